"""The options of the command-line program `skipdecode`, and its `main`."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from skipdecode.cli import commands
from skipdecode.cli.process import leave, run_command
from skipdecode.errors import ConfigError

_COMMANDS = {
    "generate": "complete prompts, at any speedup",
    "info": "show what a checkpoint was trained for, and the cost of each speedup",
    "compare": "show the outputs and times of several speedups side by side",
    "export": "write a smaller checkpoint for one speedup",
    "serve": "run a server with OpenAI's API, where each request has its own speedup",
    "order": "rank a model's layers by importance, for schedules that run the most important ones",
    "calibrate": "time a model on this machine once, so that speedups are solved for measured times",
}
_MAX_COUNT = 1_000_000  # of sequences, tokens and rounds
_GENERATE = """\
Complete each prompt and write the completions to standard output, and the decoding speed to standard error.

Prompts are the arguments, or the lines of --file or of standard input. In all of these, \\n stands for a line break:
many fine-tuned models expect one at the end of a prompt (`skipdecode info` shows an example). With --json, the lines
are {"prompt": ...}, and the output lines are {"prompt", "text", "tokens", "layers"}.
"""
_INFO = """\
Show what a checkpoint was trained for, and what each speedup costs: mean layers per token, expected speedups, and
memory for keys and values. Speedups are estimated by the calibrated profile of this machine if `skipdecode calibrate`
has written one, otherwise by an analytical cost model. A target that can't be reached is marked with the speedup that
is planned in its place.
"""
_COMPARE = """\
Decode the same prompts at full depth and at other speedups, in turns, and show the outputs and times side by side.
"""
_EXPORT = """\
Write a checkpoint for one speedup without the layers that it never runs, and report how many parameters that saves.
It generates the same tokens. The model must be trained so that prompts run no more layers than the first token
(schedule.prompt=max).

With --standalone, write a plain model with fewer layers, which transformers, vLLM, TGI and CTranslate2 can run without
schedules or custom code. The model must be trained so that all tokens run the same layers
(schedule.decay=constant schedule.prompt=max).
"""

_SERVE = """\
Run a server with OpenAI's API (/v1/completions, /v1/chat/completions). It decodes many requests together, each at its
own speedup: set `speedup` in the body, or in `extra_body` of the openai client. The response names the planned speedup
in the field skipdecode.planned_speedup and the header X-Skipdecode-Planned-Speedup. The web page at / is for trying it
out, and /metrics has metrics for Prometheus. On SIGTERM or Ctrl-C, the server accepts no more requests and finishes
those that it has.

Needs pip install 'skipdecode[serve]'.
"""
_CALIBRATE = """\
Time decode steps and prefills of a checkpoint on this machine, and keep the times as a profile in the cache folder.
From then on, skip_generate, this program and python -m eval solve the speedups of this model for the measured times.
Without a profile, speedups are solved by an analytical cost model, which is the same on every machine.
"""
_ORDER = """\
Rank the layers of a model by importance on the rows of a task, and write the order to a file, the most important layer
first. Layers are removed one by one: each time the layer without which the model's predictions change least
(Kullback-Leibler divergence from full depth). Layer 0 and the last layer are never removed. A schedule with placement
"order" runs the first layers of the order: for training, set schedule.placement=order schedule.order=FILE; for drafts
in lossless decoding, use --order FILE.

The rows are those of the training split of --task, which needs a checkout of the repository, or those of --file: lines
of {"prompt": ..., "completion": ...}. The command prints the divergence for each number of layers, without any
training, and for comparison the order by Block Influence (ShortGPT, arXiv 2403.03853).
"""


def run_and_leave() -> NoReturn:
    """Run the command and end the process with its exit status."""
    leave(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line; by default those of the process.

    Returns:
        The exit status, as `run_command` defines it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _parser().parse_args(words[:1]).command
    options = _commands()[command].parse_intermixed_args(words[1:])  # prompts may stand before and after options
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    _check(options)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for a number out of range, before anything is loaded."""
    given = vars(options)
    for name in (
        "shortlist",
        "max_prompt_tokens",
        "batch_size",
        "prompt_length",
        "new_tokens",
        "max_new_tokens",
        "most_new_tokens",
        "repeats",
        "rows",
        "queue",
    ):
        values = 1 if given.get(name) is None else given[name]
        for value in values if isinstance(values, list) else [values]:
            if not 1 <= value <= _MAX_COUNT:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be between 1 and {_MAX_COUNT}")
    speedups = given.get("speedup") or []
    speedups = speedups if isinstance(speedups, list) else [speedups]
    for speedup in speedups:
        if not 1 <= speedup < math.inf:
            raise ConfigError(f"--speedup is {speedup:g}: it must be a number of at least 1")
    if len(set(speedups)) != len(speedups):
        raise ConfigError(f"--speedup is {speedups}: the targets must differ")
    for name in ("cache_gb", "timeout", "drain"):
        value = given.get(name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}: it must be a number above 0")
    if not 0 <= given.get("port", 0) <= 65535:
        raise ConfigError(f"--port is {options.port}: it must be between 0 and 65535")
    if not options.checkpoint:
        raise ConfigError("the name of the checkpoint is empty: give a folder, or a repository of the Hugging Face Hub")


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<10}{what}" for name, what in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="skipdecode",
        description="Faster decoding with language models that skip layers (SkipDecode, arXiv 2307.02628).",
        epilog=f"commands:\n{lines}\n\nSee `skipdecode COMMAND --help` for its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="skipdecode COMMAND ...",
    )
    parser.add_argument("command", choices=list(_COMMANDS), help=argparse.SUPPRESS)
    return parser


def _commands() -> dict[str, argparse.ArgumentParser]:
    def command(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
        return argparse.ArgumentParser(
            prog=f"skipdecode {name}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    generate = command(
        "generate",
        _GENERATE,
        "examples:\n"
        "  skipdecode generate outputs/quickstart --speedup 3 'vehicle: ferry | to: Saltfern\\n'\n"
        "  skipdecode generate me/my-model --speedup 3 --file prompts.txt --batch-size 8 > texts.txt\n"
        "  skipdecode generate me/my-model --speedup 4 --lossless --file prompts.txt\n"
        "  skipdecode generate me/my-model --json < prompts.jsonl > texts.jsonl",
    )
    _add_checkpoint(generate)
    _add_prompts(generate)
    generate.add_argument("--speedup", type=float, default=1, metavar="X", help="target wall-clock speedup (default 1)")
    _add_over(generate)
    _add_strict(generate)
    generate.add_argument(
        "--schedule", metavar="FILE", help="decode with the schedule of this JSON file, in place of --speedup"
    )
    generate.add_argument(
        "--lossless",
        action="store_true",
        help="self-speculative decoding, with output identical to full depth: tokens are drafted at --speedup "
        "(default: at the best draft depth) and verified at full depth",
    )
    generate.add_argument(
        "--order",
        metavar="FILE",
        help="with --lossless: draft with the first layers of this order (see `skipdecode order`); the model needs no "
        "training for it",
    )
    generate.add_argument(
        "--batch-size", type=int, default=8, metavar="B", help="prompts that decode together (default 8)"
    )
    generate.add_argument("--stream", action="store_true", help="write text as it is generated, one prompt at a time")
    generate.add_argument("--json", action="store_true", help="read and write JSON lines")
    generate.add_argument(
        "--temperature", type=float, metavar="T", help="sample at this temperature (default: greedy decoding)"
    )
    generate.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens of total probability P"
    )
    generate.add_argument("--seed", type=int, metavar="N", help="random seed of sampling (default 0)")
    generate.set_defaults(run=commands.generate)

    info = command("info", _INFO)
    _add_checkpoint(info)
    info.add_argument(
        "--speedup", type=float, nargs="+", metavar="X", help="target speedups (default: those of training)"
    )
    info.add_argument("--batch-size", type=int, default=1, metavar="B", help="batch size (default 1)")
    info.add_argument("--prompt-length", type=int, default=64, metavar="N", help="tokens of each prompt (default 64)")
    info.add_argument("--new-tokens", type=int, default=64, metavar="N", help="new tokens of each prompt (default 64)")
    _add_over(info)
    _add_strict(info)
    info.set_defaults(run=commands.info)

    compare = command(
        "compare",
        _COMPARE,
        "example: skipdecode compare outputs/quickstart 'vehicle: ferry | to: Saltfern\\n' --speedup 2 4",
    )
    _add_checkpoint(compare)
    _add_prompts(compare)
    compare.add_argument(
        "--speedup", type=float, nargs="+", default=[3.0], metavar="X", help="target speedups (default 3)"
    )
    _add_over(compare)
    _add_strict(compare)
    compare.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="minimum number of timed rounds (default 5)"
    )
    compare.set_defaults(run=commands.compare)

    export = command(
        "export",
        _EXPORT,
        "examples:\n"
        "  skipdecode export outputs/prompt-max small --speedup 3\n"
        "  skipdecode export outputs/constant plain --speedup 3 --standalone",
    )
    _add_checkpoint(
        export, weights="solve the speedup for the profile of these weights; the weights are saved unchanged"
    )
    export.add_argument("output", metavar="FOLDER", help="folder to create")
    export.add_argument("--speedup", type=float, required=True, metavar="X", help="target speedup")
    _add_strict(export)
    export.add_argument(
        "--standalone", action="store_true", help="write a plain model with fewer layers, for any engine"
    )
    export.set_defaults(run=commands.export)

    serve = command("serve", _SERVE, "example: skipdecode serve outputs/quickstart --speedup 3 --port 8000")
    _add_checkpoint(serve, trusts=False)
    _add_serving(serve)
    serve.set_defaults(run=commands.serve, trust_remote_code=False)

    order = command(
        "order",
        _ORDER,
        "examples:\n"
        "  skipdecode order HuggingFaceTB/SmolLM2-135M-Instruct --task e2e --data-dir E2E --output order.json\n"
        "  skipdecode order me/my-model --file rows.jsonl --output order.json",
    )
    _add_checkpoint(order, weights=None)
    order.add_argument("--output", required=True, metavar="FILE", help="JSON file to create")
    order.add_argument("--task", metavar="NAME", help="use rows of this task's training split")
    order.add_argument("--data-dir", metavar="DIR", help="folder with the task's files (default: download them)")
    order.add_argument(
        "--task-option", dest="task_options", nargs="+", default=[], metavar="KEY=VALUE", help="options of the task"
    )
    order.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="truncate longer articles and posts (default: as the task does)",
    )
    order.add_argument("--file", metavar="FILE", help="use the rows of this file, in place of a task")
    order.add_argument(
        "--rows", type=int, default=64, metavar="N", help="number of rows to draw (default 64; fewer if they are long)"
    )
    order.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the draw (default 0)")
    order.add_argument(
        "--shortlist", type=int, default=5, metavar="N", help="candidate layers to try for each removal (default 5)"
    )
    order.set_defaults(run=commands.order)

    calibrate = command("calibrate", _CALIBRATE, "example: skipdecode calibrate outputs/quickstart --batch-size 1 8 32")
    _add_checkpoint(calibrate)
    sizes: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    calibrate.add_argument("--batch-size", default=[1, 8, 32], help="batch sizes to time (default 1 8 32)", **sizes)
    calibrate.add_argument(
        "--prompt-length",
        help="prompt lengths to time (default: of training: half a prompt, a prompt, and a prompt with its completion)",
        **sizes,
    )
    calibrate.add_argument(
        "--output",
        metavar="FILE",
        help="write the profile to this file and not to the cache, for a training on another machine "
        "(schedule.profile=FILE)",
    )
    calibrate.add_argument("--repeats", type=int, default=8, metavar="N", help="timed rounds (default 8)")
    calibrate.set_defaults(run=commands.calibrate)
    return {
        "generate": generate,
        "info": info,
        "compare": compare,
        "export": export,
        "serve": serve,
        "order": order,
        "calibrate": calibrate,
    }


def _add_checkpoint(
    parser: argparse.ArgumentParser,
    *,
    weights: str | None = "form of the weights to compute with",
    trusts: bool = True,
) -> None:
    parser.add_argument("checkpoint", help="folder, or repository of the Hugging Face Hub")
    parser.add_argument(
        "--gguf-file",
        metavar="FILE",
        help="read model and tokenizer from this GGUF file of the checkpoint, dequantised",
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, … (default: cuda if available)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="data type (default: as stored; float32 from GGUF)",
    )
    if weights is not None:
        parser.add_argument(
            "--weights",
            choices=["model", "packed", "int8", "int4", "int4-int8-head", "int8-int4-head"],
            help=weights,
        )
    if trusts:
        parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the checkpoint")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--speedup", type=float, default=1, metavar="X", help="default target speedup of requests (default 1)")
    _add_over(parser)
    _add_strict(parser)
    add("--name", help="name of the model in requests (default: last part of the checkpoint's name)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: only this machine)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 for any free one (default 8000)")
    add(
        "--api-key",
        metavar="KEY",
        help="key that clients must send; safer in the environment variable SKIPDECODE_API_KEY",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin, such as https://example.org, to use the server (CORS); * allows all; may "
        "be repeated",
    )
    add(
        "--rows",
        type=int,
        default=32,
        metavar="N",
        help="maximum number of sequences that decode together (default 32)",
    )
    add(
        "--queue",
        type=int,
        default=256,
        metavar="N",
        help="maximum number that wait; further ones get status 429 (default 256)",
    )
    add(
        "--cache-gb",
        type=float,
        metavar="GB",
        help="memory for keys and values (default: up to a quarter of the free memory)",
    )
    add("--wave-rows", type=int, default=1, metavar="N", help="admit sequences once N wait (default 1)")
    add(
        "--wave-seconds",
        type=float,
        default=0.05,
        metavar="S",
        help="or once the first has waited this long (default 0.05)",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="default number of new tokens of a request (default 64)",
    )
    add(
        "--most-new-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="maximum number of new tokens of a request (default 1024)",
    )
    add("--timeout", type=float, default=300, metavar="S", help="time limit of a request (default 300)")
    add("--drain", type=float, default=30, metavar="S", help="time to finish requests at shutdown (default 30)")


def _add_over(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--over",
        choices=["decode", "all"],
        help="time that a speedup refers to: decoding only, or all (prefill and decoding) (default: as in training)",
    )


def _add_strict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a target that can't be reached (default: warn, and use the fastest trained schedule)",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts (default: the lines of standard input)")
    parser.add_argument("--file", metavar="FILE", help="read a prompt from each line; - is standard input")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of new tokens of each prompt (default 64)",
    )
