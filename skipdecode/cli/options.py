"""The command line `skipdecode`: its options, and `main`."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from skipdecode.cli import commands as subcommands
from skipdecode.cli.process import leave, run_command
from skipdecode.errors import ConfigError

_COMMANDS = {
    "generate": "write what follows a prompt, at any speed",
    "info": "what a checkpoint was trained for, and what each speed costs",
    "compare": "the same prompts at several speeds, side by side with times",
    "export": "a smaller checkpoint for one speed",
    "serve": "answer requests with OpenAI's interface, each at a speed of its own",
    "order": "find which layers of a model matter most, for schedules that run these",
    "calibrate": "measure this machine's clock once, for speeds that are met on it",
}
_LARGEST = 1_000_000  # of what is counted: rows, tokens, rounds
_GENERATE = """\
Write what follows each prompt to standard output, and the speed to standard error.

A prompt is an argument, a line of --file, or a line of standard input. In all of these \\n is a line break: many
fine-tuned models want their prompt to end in one (`skipdecode info` shows an example). With --json, lines of
{"prompt": ...} are read as well, and {"prompt", "text", "tokens", "layers"} is written.
"""
_INFO = """\
Say what a checkpoint was trained for, and what each speed costs: layers per token, speed by the bytes that a step
reads, or by this machine's clock where `skipdecode calibrate` has measured it, keys and values held. A target that
can't be reached is marked with the speed that is planned in its place.
"""
_COMPARE = """\
Decode the same prompts at full depth and at other speeds, in turns, and show texts and times side by side.
"""
_EXPORT = """\
Write a checkpoint for one speed, without the layers that it never runs, and say what that saves. It decodes the same
tokens. Prompts must have been trained to run no more layers than the first token (schedule.prompt=max).

With --standalone it is a plain model of fewer layers, which transformers, vLLM, TGI or CTranslate2 run as any other:
without schedules and without code. Then every token must have been trained to run the same layers
(schedule.decay=constant schedule.prompt=max).
"""

_SERVE = """\
Answer requests with OpenAI's interface (/v1/completions, /v1/chat/completions), many at once, each at a speed of its
own: `speedup` in the body, or in `extra_body` of the openai client. The speedup that an answer
was planned at is its field skipdecode.planned_speedup and its header X-Skipdecode-Planned-Speedup. At / is a page to
try it, at /metrics are figures for Prometheus. SIGTERM and Ctrl-C take no more requests and answer those there are.

Needs pip install 'skipdecode[serve]'.
"""
_CALIBRATE = """\
Time decode steps and prompts of a checkpoint on this machine, and keep the times where caches belong. From then on a
speed that is asked for here is solved for this clock: by skip_generate, by this command and by python -m eval. Without
such a profile speeds follow from the bytes that a step reads, the same on every machine.
"""
_ORDER = """\
Find which layers of a model matter most on rows of a task, and write them to a file, the most important first. Layers
are taken out one after the other: each time the one without which the model's predictions move least (Kullback-Leibler
divergence from full depth). Layer 0 and the last one stay. A schedule with placement "order" runs the first layers of
the order, in training (schedule.placement=order schedule.order=FILE) and as drafts of lossless decoding (--order FILE).

The rows are those of a task's training split (--task; needs a checkout of the repository), or of --file: lines of
{"prompt": ..., "completion": ...}. Printed are the divergence by number of layers, without any training, and the order
by Block Influence (ShortGPT, arXiv 2403.03853) beside it.
"""


def run_and_leave() -> NoReturn:
    """Run the command that the process is for."""
    leave(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status, as `run_command` does."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = _parser().parse_args(words[:1]).command
    options = _commands()[command].parse_intermixed_args(words[1:])  # prompts may come before options and after
    return run_command(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    _check(options)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for a number out of range, before anything is loaded."""
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
            if not 1 <= value <= _LARGEST:
                least_or_most = "at least 1" if value < 1 else f"at most {_LARGEST}"
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {least_or_most}")
    speedups = given.get("speedup") or []
    speedups = speedups if isinstance(speedups, list) else [speedups]
    for speedup in speedups:
        if not 1 <= speedup < math.inf:
            raise ConfigError(f"--speedup is {speedup:g}: it must be a number of at least 1")
    if len(set(speedups)) != len(speedups):
        raise ConfigError(f"--speedup is {speedups}: name different targets")
    for name in ("cache_gb", "timeout", "drain"):
        value = given.get(name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}: it must be a number above 0")
    if not 0 <= given.get("port", 0) <= 65535:
        raise ConfigError(f"--port is {options.port}: it must lie between 0 and 65535")
    if not options.checkpoint:
        raise ConfigError("the checkpoint is an empty name: name a folder, or a repository of the Hub")


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<10}{what}" for name, what in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="skipdecode",
        description="Decode with checkpoints that skip layers as they generate (arXiv 2307.02628).",
        epilog=f"commands:\n{lines}\n\n`skipdecode COMMAND --help` says more.",
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
    generate.add_argument("--schedule", metavar="FILE", help="a schedule of your own, in place of a target")
    generate.add_argument(
        "--lossless",
        action="store_true",
        help="full depth's own text: the speedup, or one that is chosen, drafts for it",
    )
    generate.add_argument(
        "--order",
        metavar="FILE",
        help="with --lossless: the first layers of this order draft (`skipdecode order`), also of an untrained model",
    )
    generate.add_argument("--batch-size", type=int, default=8, metavar="B", help="prompts together (default 8)")
    generate.add_argument("--stream", action="store_true", help="write words as they come; one prompt at a time")
    generate.add_argument("--json", action="store_true", help="read and write lines of JSON")
    generate.add_argument("--temperature", type=float, metavar="T", help="sample; greedy without")
    generate.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that make up P")
    generate.add_argument("--seed", type=int, metavar="N", help="of sampling (default 0)")
    generate.set_defaults(run=subcommands.generate)

    info = command("info", _INFO)
    _add_checkpoint(info)
    info.add_argument("--speedup", type=float, nargs="+", metavar="X", help="default: those that it was trained for")
    info.add_argument("--batch-size", type=int, default=1, metavar="B", help="default 1")
    info.add_argument("--prompt-length", type=int, default=64, metavar="N", help="tokens (default 64)")
    info.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default 64")
    _add_over(info)
    _add_strict(info)
    info.set_defaults(run=subcommands.info)

    compare = command(
        "compare",
        _COMPARE,
        "example: skipdecode compare outputs/quickstart 'vehicle: ferry | to: Saltfern\\n' --speedup 2 4",
    )
    _add_checkpoint(compare)
    _add_prompts(compare)
    compare.add_argument("--speedup", type=float, nargs="+", default=[3.0], metavar="X", help="targets (default 3)")
    _add_over(compare)
    _add_strict(compare)
    compare.add_argument("--repeats", type=int, default=5, metavar="N", help="timed rounds at least (default 5)")
    compare.set_defaults(run=subcommands.compare)

    export = command(
        "export",
        _EXPORT,
        "examples:\n"
        "  skipdecode export outputs/prompt-max small --speedup 3\n"
        "  skipdecode export outputs/constant plain --speedup 3 --standalone",
    )
    _add_checkpoint(export, weights="those whose calibrated clock the speed is solved for; they are saved as they are")
    export.add_argument("output", metavar="FOLDER", help="a new folder")
    export.add_argument("--speedup", type=float, required=True, metavar="X", help="the target")
    _add_strict(export)
    export.add_argument("--standalone", action="store_true", help="a plain model of fewer layers, for any engine")
    export.set_defaults(run=subcommands.export)

    serve = command("serve", _SERVE, "example: skipdecode serve outputs/quickstart --speedup 3 --port 8000")
    _add_checkpoint(serve, trusts=False)
    _add_serving(serve)
    serve.set_defaults(run=subcommands.serve, trust_remote_code=False)

    order = command(
        "order",
        _ORDER,
        "examples:\n"
        "  skipdecode order HuggingFaceTB/SmolLM2-135M-Instruct --task e2e --data-dir E2E --output order.json\n"
        "  skipdecode order me/my-model --file rows.jsonl --output order.json",
    )
    _add_checkpoint(order, weights=None)
    order.add_argument("--output", required=True, metavar="FILE", help="a new JSON file")
    order.add_argument("--task", metavar="NAME", help="the task whose training split has the rows")
    order.add_argument("--data-dir", metavar="DIR", help="the folder of the task's files; default: the Hub")
    order.add_argument(
        "--task-option", dest="task_options", nargs="+", default=[], metavar="KEY=VALUE", help="options of the task"
    )
    order.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="longer articles and posts are cut (default: the task's)"
    )
    order.add_argument("--file", metavar="FILE", help="rows of your own, in place of a task")
    order.add_argument(
        "--rows", type=int, default=64, metavar="N", help="drawn from them (default 64; fewer of long ones)"
    )
    order.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default 0)")
    order.add_argument(
        "--shortlist", type=int, default=5, metavar="N", help="layers that each removal tries (default 5)"
    )
    order.set_defaults(run=subcommands.order)

    calibrate = command("calibrate", _CALIBRATE, "example: skipdecode calibrate outputs/quickstart --batch-size 1 8 32")
    _add_checkpoint(calibrate)
    sizes: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    calibrate.add_argument("--batch-size", default=[1, 8, 32], help="rows together (default 1 8 32)", **sizes)
    calibrate.add_argument(
        "--prompt-length", help="tokens (default: half of its training's, as many, with a text behind them)", **sizes
    )
    calibrate.add_argument(
        "--output",
        metavar="FILE",
        help="write the times to this file in place of this machine's cache: for a training elsewhere "
        "(schedule.profile=FILE)",
    )
    calibrate.add_argument("--repeats", type=int, default=8, metavar="N", help="of each (default 8)")
    calibrate.set_defaults(run=subcommands.calibrate)
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
    weights: str | None = "what prompts and decode steps are computed with",
    trusts: bool = True,
) -> None:
    parser.add_argument("checkpoint", help="a folder, or a repository of the Hub")
    parser.add_argument(
        "--gguf-file", metavar="FILE", help="read model and tokenizer from this GGUF file in it, dequantised"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: as it is stored (float32 from GGUF)",
    )
    if weights is not None:
        parser.add_argument(
            "--weights",
            choices=["model", "packed", "int8", "int4", "int4-int8-head", "int8-int4-head"],
            help=weights,
        )
    if trusts:
        parser.add_argument(
            "--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings"
        )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--speedup", type=float, default=1, metavar="X", help="of requests that name none (default 1)")
    _add_over(parser)
    _add_strict(parser)
    add("--name", help="of the model in requests (default: the last part of the checkpoint's name)")
    add("--host", default="127.0.0.1", help="the address to listen at (default 127.0.0.1: this machine alone)")
    add("--port", type=int, default=8000, metavar="N", help="0: any that is free (default 8000)")
    add("--api-key", metavar="KEY", help="that requests must show; better in the environment, as SKIPDECODE_API_KEY")
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="whose pages may ask from a browser, such as https://example.org, or * for all (CORS); may be repeated",
    )
    add("--rows", type=int, default=32, metavar="N", help="texts that decode at once (default 32)")
    add("--queue", type=int, default=256, metavar="N", help="texts that wait at most; more get 429 (default 256)")
    add("--cache-gb", type=float, metavar="GB", help="keys and values (default: a quarter of the free memory at most)")
    add("--wave-rows", type=int, default=1, metavar="N", help="admit when so many texts wait (default 1)")
    add("--wave-seconds", type=float, default=0.05, metavar="S", help="or the first has waited so long (default 0.05)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="of requests that don't say (default 64)")
    add("--most-new-tokens", type=int, default=1024, metavar="N", help="that a request may ask for (default 1024)")
    add("--timeout", type=float, default=300, metavar="S", help="after which a request is given up (default 300)")
    add("--drain", type=float, default=30, metavar="S", help="that requests may still take at the end (default 30)")


def _add_over(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--over",
        choices=["decode", "all"],
        help="the time that a speedup is of: of decoding, or all, prompt and decoding together (default: as the "
        "checkpoint was trained)",
    )


def _add_strict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a target that can't be reached; without it the fastest schedule that the checkpoint was trained "
        "for decodes, with a warning",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of standard input")
    parser.add_argument("--file", metavar="FILE", help="a prompt on each line; - is standard input")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each prompt (default 64)")
