"""The options of the command-line program `skipdecode`, and its `main`."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from skipdecode.cli import commands
from skipdecode.cli.process import leave, run_command
from skipdecode.cli.renamed_options import add_old_name
from skipdecode.errors import ConfigError

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
out, /health is for probes, and /metrics has metrics for Prometheus. On SIGTERM or Ctrl-C, the server finishes the
requests that are running, and answers new ones with status 503.

Needs pip install 'skipdecode[serve]', and with --replicas 'skipdecode[ray]'.
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
    """Run a command with these arguments (default: the process's). Returns the exit status, as `run_command` does."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _parser().parse_args(words[:1]).command
    options = command_parser(command).parse_intermixed_args(words[1:])  # prompts may stand before and after options
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    _check(options)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for a number out of range, before anything is loaded."""
    given = vars(options)
    counts = ("shortlist", "max_prompt_tokens", "batch_size", "prompt_length", "new_tokens", "max_new_tokens")
    for name in (*counts, "max_new_tokens_limit", "repeats", "rows", "queue", "replicas", "threads", "wave_tokens"):
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
    lines = "\n".join(f"  {name:<10}{what}" for name, (what, _) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="skipdecode",
        description="Faster decoding with language models that skip layers (SkipDecode, arXiv 2307.02628).",
        epilog=f"commands:\n{lines}\n\nSee `skipdecode COMMAND --help` for its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="skipdecode COMMAND ...",
    )
    parser.add_argument("command", choices=list(_COMMANDS), help=argparse.SUPPRESS)
    return parser


def command_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"skipdecode {name}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=getattr(commands, name))
    _COMMANDS[name][1](parser)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = _GENERATE
    parser.epilog = (
        "examples:\n"
        "  skipdecode generate outputs/quickstart --speedup 3 'vehicle: ferry | to: Saltfern\\n'\n"
        "  skipdecode generate me/my-model --speedup 3 --file prompts.txt --batch-size 8 > completions.txt\n"
        "  skipdecode generate me/my-model --speedup 4 --lossless --file prompts.txt\n"
        "  skipdecode generate me/my-model --json < prompts.jsonl > completions.jsonl"
    )
    _add_checkpoint(parser)
    _add_prompts(parser)
    _add_number(parser, "--speedup", 1, "target wall-clock speedup", float, "X")
    _add_target(parser)
    add = parser.add_argument
    add("--schedule", metavar="FILE", help="decode with the schedule of this JSON file, in place of --speedup")
    add(
        "--lossless",
        action="store_true",
        help="self-speculative decoding, with output identical to full depth: tokens are drafted at --speedup "
        "(default: at the best draft depth) and verified at full depth",
    )
    add(
        "--order",
        metavar="FILE",
        help="with --lossless: draft with the first layers of this order (see `skipdecode order`); the model needs no "
        "training for it",
    )
    _add_number(parser, "--batch-size", 8, "prompts that decode together", metavar="B")
    add("--stream", action="store_true", help="write text as it is generated, one prompt at a time")
    add("--json", action="store_true", help="read and write JSON lines")
    add("--temperature", type=float, metavar="T", help="sample at this temperature (default: greedy decoding)")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of total probability P")
    add("--seed", type=int, metavar="N", help="random seed of sampling (default 0)")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.description = _INFO
    _add_checkpoint(parser)
    add = parser.add_argument
    add("--speedup", type=float, nargs="+", metavar="X", help="target speedups (default: those of training)")
    _add_number(parser, "--batch-size", 1, "batch size", metavar="B")
    _add_number(parser, "--prompt-length", 64, "tokens of each prompt")
    _add_number(parser, "--new-tokens", 64, "new tokens of each prompt")
    _add_target(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = _COMPARE
    parser.epilog = "example: skipdecode compare outputs/quickstart 'vehicle: ferry | to: Saltfern\\n' --speedup 2 4"
    _add_checkpoint(parser)
    _add_prompts(parser)
    add = parser.add_argument
    add("--speedup", type=float, nargs="+", default=[3.0], metavar="X", help="target speedups (default 3)")
    _add_target(parser)
    _add_number(parser, "--repeats", 5, "minimum number of timed rounds")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = _EXPORT
    parser.epilog = (
        "examples:\n"
        "  skipdecode export outputs/prompt-max small --speedup 3\n"
        "  skipdecode export outputs/constant plain --speedup 3 --standalone"
    )
    _add_checkpoint(parser, "solve the speedup for the profile of these weights; the weights are saved unchanged")
    add = parser.add_argument
    add("output", metavar="FOLDER", help="folder to create")
    add("--speedup", type=float, required=True, metavar="X", help="target speedup")
    _add_target(parser, over=False)
    add("--standalone", action="store_true", help="write a plain model with fewer layers, for any engine")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = _SERVE
    parser.epilog = "example: skipdecode serve outputs/quickstart --speedup 3 --port 8000"
    _add_checkpoint(parser, trusts=False)
    add = parser.add_argument
    _add_number(parser, "--speedup", 1, "default target speedup of requests", float, "X")
    _add_target(parser)
    add("--name", help="name of the model in requests (default: last part of the checkpoint's name)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: only this machine)")
    _add_number(parser, "--port", 8000, "port to listen on; 0 for any free one")
    add("--api-key", metavar="KEY", help="key that clients must send; safer in the environment as SKIPDECODE_API_KEY")
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow web pages of this origin, such as https://example.org, to use the server (CORS); * allows all; may "
        "be repeated",
    )
    _add_number(parser, "--rows", 32, "maximum number of sequences that decode together")
    _add_number(parser, "--queue", 256, "maximum number of sequences that wait; further ones get status 429")
    add("--cache-gb", type=float, metavar="GB", help="memory for keys and values (default: up to 1/4 of free memory)")
    _add_number(parser, "--prefix-mib", 512, "memory for keys and values of earlier prompts; 0: none", float, "MIB")
    _add_number(parser, "--wave-tokens", 256, "maximum number of prompt tokens that run between two steps")
    _add_number(parser, "--wave-rows", 1, "admit waiting sequences once there are N")
    _add_number(parser, "--wave-seconds", 0.05, "or once the first has waited this long", float, "S")
    _add_number(parser, "--max-new-tokens", 64, "default number of new tokens of a request")
    limit = _add_number(parser, "--max-new-tokens-limit", 1024, "maximum number of new tokens of a request")
    add_old_name(parser, "--most-new-tokens", limit)
    _add_number(parser, "--timeout", 300, "time limit of a request", float, "S")
    _add_number(parser, "--drain", 30, "time to finish requests at shutdown", float, "S")
    replicas = "run N servers of the model behind one address, with Ray Serve: one for each GPU, or on CPUs"
    add("--replicas", type=int, metavar="N", help=replicas)
    threads = "CPU threads of the server, or of each replica (default: all, divided among the replicas)"
    add("--threads", type=int, metavar="N", help=threads)


def _add_order(parser: argparse.ArgumentParser) -> None:
    parser.description = _ORDER
    parser.epilog = (
        "examples:\n"
        "  skipdecode order HuggingFaceTB/SmolLM2-135M-Instruct --task e2e --data-dir E2E --output order.json\n"
        "  skipdecode order me/my-model --file rows.jsonl --output order.json"
    )
    _add_checkpoint(parser, weights=None)
    add = parser.add_argument
    add("--output", required=True, metavar="FILE", help="JSON file to create")
    add("--task", metavar="NAME", help="use rows of this task's training split")
    add("--data-dir", metavar="DIR", help="folder with the task's files (default: download them)")
    add("--task-option", dest="task_options", nargs="+", default=[], metavar="KEY=VALUE", help="options of the task")
    add("--max-prompt-tokens", type=int, metavar="N", help="truncate longer articles and posts (default: by task)")
    add("--file", metavar="FILE", help="use the rows of this file, in place of a task")
    _add_number(parser, "--rows", 64, "number of rows to draw, fewer if they are long")
    _add_number(parser, "--seed", 0, "random seed of the draw")
    _add_number(parser, "--shortlist", 5, "candidate layers to try for each removal")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = _CALIBRATE
    parser.epilog = "example: skipdecode calibrate outputs/quickstart --batch-size 1 8 32"
    _add_checkpoint(parser)
    add = parser.add_argument
    sizes: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    add("--batch-size", default=[1, 8, 32], help="batch sizes to time (default 1 8 32)", **sizes)
    add(
        "--prompt-length",
        help="prompt lengths to time (default: of training: half a prompt, a prompt, and a prompt with its completion)",
        **sizes,
    )
    add(
        "--output",
        metavar="FILE",
        help="write the profile to this file and not to the cache, for a training on another machine "
        "(schedule.profile=FILE)",
    )
    _add_number(parser, "--repeats", 8, "timed rounds")


def _add_number(
    parser: argparse.ArgumentParser, name: str, default: float, meaning: str, kind: type = int, metavar: str = "N"
) -> argparse.Action:
    what = f"{meaning} (default {default})"
    return parser.add_argument(name, type=kind, default=default, metavar=metavar, help=what)


def _add_checkpoint(
    parser: argparse.ArgumentParser, weights: str | None = "form of the weights to compute with", *, trusts: bool = True
) -> None:
    add = parser.add_argument
    add("checkpoint", help="folder, or repository of the Hugging Face Hub")
    add("--gguf-file", metavar="FILE", help="read model and tokenizer from this GGUF file in the folder")
    add("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, … (default: cuda if available)")
    types = ["float32", "bfloat16", "float16"]
    add("--dtype", choices=types, help="data type (default: as stored; float32 from GGUF)")
    if weights is not None:
        forms = ["model", "packed", "int8", "int4", "int4-int8-head", "int8-int4-head"]
        add("--weights", choices=forms, help=weights)
    if trusts:
        add("--trust-remote-code", action="store_true", help="run Python code from the checkpoint")


def _add_target(parser: argparse.ArgumentParser, *, over: bool = True) -> None:
    """Add the options that say what a target speedup refers to, and what happens if it can't be reached."""
    if over:
        parser.add_argument(
            "--over",
            choices=["decode", "all"],
            help="time that a speedup refers to: decoding, or all (prefill and decoding) (default: as in training)",
        )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a target that can't be reached (default: warn, and use the fastest trained schedule)",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts (default: the lines of standard input)")
    parser.add_argument("--file", metavar="FILE", help="read a prompt from each line; - is standard input")
    _add_number(parser, "--max-new-tokens", 64, "maximum number of new tokens of each prompt")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "generate": ("complete prompts, at any speedup", _add_generate),
    "info": ("show what a checkpoint was trained for, and the cost of each speedup", _add_info),
    "compare": ("show the outputs and times of several speedups side by side", _add_compare),
    "export": ("write a smaller checkpoint for one speedup", _add_export),
    "serve": ("run a server with OpenAI's API, where each request has its own speedup", _add_serve),
    "order": ("rank a model's layers by importance, for schedules that run the most important ones", _add_order),
    "calibrate": ("time a model on this machine once, so that speedups are solved for measured times", _add_calibrate),
}
