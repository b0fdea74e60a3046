"""The command `skipdecode`: decode with a checkpoint, ask what it can do, see two speeds side by side."""

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.command import run_command
from skipdecode.errors import ConfigError

if TYPE_CHECKING:
    from skipdecode.texts import Decoded, Decoder

_COMMANDS = {
    "generate": "write what follows a prompt, at any speed",
    "info": "what a checkpoint was trained for, and what each speed costs",
    "compare": "the same prompts at several speeds, side by side with times",
    "export": "a smaller checkpoint for one speed",
    "calibrate": "measure this machine's clock once, for speeds that are met on it",
}
_LARGEST = 1_000_000  # of what is counted: rows, tokens, rounds
# Ends of lines to readers of Unicode texts, though not to JSON.
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\u0085\u2028\u2029"}
_GENERATE = """\
Write what follows each prompt to standard output, and the speed to standard error.

A prompt is an argument, a line of --file, or a line of standard input. In all of these \\n is a line break: many
fine-tuned models want their prompt to end in one (`skipdecode info` shows an example). With --json, lines of
{"prompt": ...} are read as well, and {"prompt", "text", "tokens", "layers"} is written.
"""
_INFO = """\
Say what a checkpoint was trained for, and what each speed costs: layers per token, speed by the bytes that a step
reads, or by this machine's clock where `skipdecode calibrate` has measured it, keys and values held.
"""
_COMPARE = """\
Decode the same prompts at full depth and at other speeds, in turns, and show texts and times side by side.
"""
_EXPORT = """\
Write a checkpoint for one speed, without the layers that it never runs, and say what that saves. It decodes the same
tokens. Prompts must have been trained to run no more layers than the first token (schedule.prompt=max).
"""


_CALIBRATE = """\
Time decode steps and prompts of a checkpoint on this machine, and keep the times where caches belong. From then on a
speed that is asked for here is solved for this clock: by skip_generate, by this command and by python -m eval. Without
such a profile speeds follow from the bytes that a step reads, the same on every machine.
"""


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
    for name in ("batch_size", "prompt_length", "new_tokens", "max_new_tokens", "repeats"):
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
        "  skipdecode generate me/my-model --json < prompts.jsonl > texts.jsonl",
    )
    _add_checkpoint(generate)
    _add_prompts(generate)
    generate.add_argument("--speedup", type=float, default=1, metavar="X", help="target wall-clock speedup (default 1)")
    _add_over(generate)
    generate.add_argument("--schedule", metavar="FILE", help="a schedule of your own, in place of a target")
    generate.add_argument("--batch-size", type=int, default=8, metavar="B", help="prompts together (default 8)")
    generate.add_argument("--stream", action="store_true", help="write words as they come; one prompt at a time")
    generate.add_argument("--json", action="store_true", help="read and write lines of JSON")
    generate.add_argument("--temperature", type=float, metavar="T", help="sample; greedy without")
    generate.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that make up P")
    generate.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    generate.set_defaults(run=_generate)

    info = command("info", _INFO)
    _add_checkpoint(info)
    info.add_argument("--speedup", type=float, nargs="+", metavar="X", help="default: those that it was trained for")
    info.add_argument("--batch-size", type=int, default=1, metavar="B", help="default 1")
    info.add_argument("--prompt-length", type=int, default=64, metavar="N", help="tokens (default 64)")
    info.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default 64")
    _add_over(info)
    info.set_defaults(run=_info)

    compare = command(
        "compare",
        _COMPARE,
        "example: skipdecode compare outputs/quickstart 'vehicle: ferry | to: Saltfern\\n' --speedup 2 4",
    )
    _add_checkpoint(compare)
    _add_prompts(compare)
    compare.add_argument("--speedup", type=float, nargs="+", default=[3.0], metavar="X", help="targets (default 3)")
    _add_over(compare)
    compare.add_argument("--repeats", type=int, default=5, metavar="N", help="timed rounds at least (default 5)")
    compare.set_defaults(run=_compare)

    export = command("export", _EXPORT, "example: skipdecode export outputs/prompt-max small --speedup 3")
    _add_checkpoint(export)
    export.add_argument("output", metavar="FOLDER", help="a new folder")
    export.add_argument("--speedup", type=float, required=True, metavar="X", help="the target")
    export.set_defaults(run=_export)

    calibrate = command("calibrate", _CALIBRATE, "example: skipdecode calibrate outputs/quickstart --batch-size 1 8 32")
    _add_checkpoint(calibrate)
    sizes: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    calibrate.add_argument("--batch-size", default=[1, 8, 32], help="rows together (default 1 8 32)", **sizes)
    calibrate.add_argument("--prompt-length", help="tokens (default: those that it was trained with, or 64)", **sizes)
    calibrate.add_argument("--repeats", type=int, default=8, metavar="N", help="of each (default 8)")
    calibrate.set_defaults(run=_calibrate)
    return {"generate": generate, "info": info, "compare": compare, "export": export, "calibrate": calibrate}


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a folder, or a repository of the Hub")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as it is stored")
    parser.add_argument(
        "--weights", choices=["model", "packed", "int8"], help="what prompts and decode steps are computed with"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")


def _add_over(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--over",
        choices=["decode", "all"],
        help="the time that a speedup is of: of decoding, or all, prompt and decoding together (default: as the "
        "checkpoint was trained)",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of standard input")
    parser.add_argument("--file", metavar="FILE", help="a prompt on each line; - is standard input")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each prompt (default 64)")


def _generate(options: argparse.Namespace) -> int:
    if options.schedule is not None and (options.speedup != 1 or options.over is not None):
        raise ConfigError("--schedule says how fast it is: leave --speedup and --over out")
    if options.stream and options.json:
        raise ConfigError("--stream writes words as they come: leave --json out")
    sampling: dict[str, Any] = {}
    if options.temperature is not None or options.top_p is not None:
        _check_sampling(options)
        sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    prompts = _prompts(options, as_json=options.json)
    from skipdecode.schedule import SkipSchedule

    schedule = SkipSchedule.load(options.schedule) if options.schedule is not None else None
    decoder = _decoder(options, **sampling)
    decoder.check(prompts)
    if schedule is None:
        decoder.schedule(options.speedup, options.over)  # for the errors, before anything is written
    if sampling:
        import torch

        torch.manual_seed(options.seed)
    total: Decoded | None = None
    streamer = None
    if options.stream:
        from transformers import TextStreamer

        streamer = TextStreamer(decoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
    size = 1 if streamer is not None else options.batch_size
    for at in range(0, len(prompts), size):
        batch = prompts[at : at + size]
        solved = schedule or decoder.schedule_of(batch, options.speedup, options.over)
        decoded = decoder.decode(batch, solved, streamer)
        for completion in decoded.completions if streamer is None else ():
            line = completion.text
            if options.json:
                fields = ("prompt", "text", "tokens", "layers")
                line = json.dumps({field: getattr(completion, field) for field in fields}, ensure_ascii=False)
                line = line.translate(_LINE_ENDS)
            print(line, flush=True)
        total = decoded if total is None else total + decoded
    assert total is not None  # there is at least one prompt
    print(_speed(total, solved.num_layers), file=sys.stderr)
    return 0


def _speed(decoded: "Decoded", num_layers: int) -> str:
    return (
        f"{decoded.layers_per_token:.2f} of {num_layers} layers per token, "
        f"{decoded.tokens_per_second:.1f} tokens/s (prompts {decoded.prefill_seconds:.2f} s, "
        f"decoding {decoded.decode_seconds:.2f} s)"
    )


def _info(options: argparse.Namespace) -> int:
    decoder = _decoder(options)
    from skipdecode.checkpoint import SkipConfig
    from skipdecode.cost import CostModel, count_parameters
    from skipdecode.decode import profile_for
    from skipdecode.families import text_config
    from skipdecode.texts import price

    model = decoder.model
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is not None and options.prompt_length > positions:
        raise ConfigError(f"--prompt-length is {options.prompt_length}: the model has {positions} positions")
    remembered = SkipConfig.of(model.config)
    depth = CostModel.of(model).num_layers
    parameters = count_parameters(model.parameters())
    print(f"{options.checkpoint}: {model.config.model_type}, {depth} layers, {parameters / 1e6:.1f} M parameters")
    if remembered is None:
        print("it doesn't say what it was trained for: nothing but full depth can be expected to read well")
    else:
        _print_training(remembered)
    trained = (sorted(remembered.schedules) if remembered is not None else []) or [1.0]
    speedups = options.speedup or (trained if len(trained) <= 8 else _spread(trained, 7))
    conditions = {"batch_size": options.batch_size, "prompt_length": options.prompt_length}
    prices = price(decoder, speedups, over=options.over, **conditions, new_tokens=options.new_tokens)
    headers = ["target", "layers", "prompt", "layers per token", "decoding", "whole", "cache MB", "trained for"]
    rows = [
        [
            f"{found.speedup:g}x",
            f"{found.schedule.max_layers} to {found.schedule.min_layers} of {depth}",
            str(found.schedule.prompt_budget),
            f"{found.layers:.2f}",
            f"{found.predicted:.2f}x",
            f"{found.whole:.2f}x",
            f"{found.cache_bytes / 1e6:.2f}",
            "yes" if found.trained else "no",
        ]
        for found in prices
    ]
    print()
    for line in _aligned([headers, *rows]):
        print(line)
    over = options.over or (remembered.over if remembered is not None else "decode")
    profile = profile_for(model, options.weights)
    clock = "bytes and operations" if profile is None else f"this machine's clock, measured {profile.date}"
    print(
        f"\nbatch {options.batch_size}, {options.prompt_length} prompt tokens, {options.new_tokens} new ones; targets "
        f"are of {'decoding' if over == 'decode' else 'prompt and decoding together'}; speeds by {clock}, over full "
        "depth"
    )
    return 0


def _print_training(remembered: Any) -> None:
    speeds = remembered.trained_range
    if speeds is not None:
        drawn = f"{speeds[0]:g}x" if speeds[0] == speeds[1] else f"{speeds[0]:g}x to {speeds[1]:g}x"
        print(f"trained for {drawn} ({len(remembered.schedules)} schedules)")
    if remembered.task.get("name"):
        print(f"on the task {remembered.task['name']}")
    if remembered.task.get("example"):
        print(f"with prompts such as {json.dumps(remembered.task['example'], ensure_ascii=False)}")


def _spread(values: Sequence[float], count: int) -> list[float]:
    return [values[round(n * (len(values) - 1) / (count - 1))] for n in range(count)]


def _compare(options: argparse.Namespace) -> int:
    prompts = _prompts(options)
    decoder = _decoder(options)
    decoder.check(prompts)
    from skipdecode.texts import compare

    found = compare(decoder, prompts, options.speedup, options.repeats, options.over)
    names = [f"{speedup:g}x" for speedup in found.speedups]
    width = max(24, (shutil.get_terminal_size().columns - 3 * (len(names) - 1)) // len(names))
    for number, prompt in enumerate(prompts):
        print(f"> {prompt.rstrip()}")
        texts = [decoded.completions[number].text for decoded in found.decoded]
        for line in _side_by_side(names, texts, width):
            print(line)
        print()
    if not found.paces:
        print(f"too short to be timed: no text has more than {found.tokens} token{'s' if found.tokens > 1 else ''}")
        return 0
    headers = ["target", "decoding", "whole", "layers per token", "tokens/s", "prompts s", "decoding s"]
    rows = [
        [
            name,
            *([str(pace.speedup), str(pace.whole)] if number else ["1.00x"] * 2),
            f"{pace.layers:.2f}",
            f"{pace.tokens_per_second:.1f}",
            f"{pace.prefill_seconds:.3f}",
            f"{pace.decode_seconds:.3f}",
        ]
        for number, (name, pace) in enumerate(zip(names, found.paces, strict=True))
    ]
    for line in _aligned([headers, *rows]):
        print(line)
    print(
        "\nspeed of decoding, and of prompts and decoding together, over full depth's: median [quartiles] of "
        f"{found.rounds} rounds in turns; each goes on to {found.tokens} tokens, as many as the longest text has"
    )
    return 0


def _export(options: argparse.Namespace) -> int:
    decoder = _decoder(options)
    from skipdecode.prune import export

    schedule = decoder.schedule(options.speedup)
    found = export(decoder.model, decoder.tokenizer, schedule, options.speedup, options.output)
    saved = 1 - found.parameters / found.parameters_before
    print(
        f"{options.output}: {found.layers} of {found.layers_before} layers, {found.parameters / 1e6:.2f} of "
        f"{found.parameters_before / 1e6:.2f} M parameters ({saved:.0%} saved); made for {options.speedup:g}x alone"
    )
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    decoder = _decoder(options)
    from skipdecode.calibrate import measure_profile
    from skipdecode.checkpoint import SkipConfig

    remembered = SkipConfig.of(decoder.model.config) or SkipConfig()
    sizes, lengths = options.batch_size, options.prompt_length or [remembered.prompt_length]
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        print(f"{done} of {len(sizes) * len(lengths)} batches timed", file=sys.stderr)

    profile = measure_profile(
        decoder.model,
        batch_sizes=sizes,
        prompt_lengths=lengths,
        weights=options.weights,
        repeats=options.repeats,
        advance=advance,
    )
    depth = profile.num_layers
    rows = [
        [
            str(batch.batch_size),
            str(batch.prompt_length),
            f"{batch.step[depth] * 1000:.2f}",
            f"{batch.step[1] * 1000:.2f}",
            f"{batch.prefill[depth] * 1000:.1f}",
            f"{batch.prefill[1] * 1000:.1f}",
        ]
        for batch in profile.batches
    ]
    for line in _aligned([["batch", "prompt", "ms a step", "of 1 layer", "ms of prompts", "of 1 layer"], *rows]):
        print(line)
    print(f"\nkept in {profile.save()}: speeds of this model are solved for it from now on; remove it to undo that")
    return 0


def _side_by_side(headers: Sequence[str], texts: Sequence[str], width: int) -> list[str]:
    wrapped = [
        [header, *(line for part in text.strip().splitlines() for line in textwrap.wrap(part, width) or [""])]
        for header, text in zip(headers, texts, strict=True)
    ]
    height = max(map(len, wrapped))
    padded = [lines + [""] * (height - len(lines)) for lines in wrapped]
    return [" | ".join(line.ljust(width) for line in row).rstrip() for row in zip(*padded, strict=True)]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _prompts(options: argparse.Namespace, *, as_json: bool = False) -> list[str]:
    """The prompts of the arguments, of a file or of standard input. Raises ConfigError where there are none."""
    if options.prompts and options.file is not None:
        raise ConfigError("prompts are given as arguments and by --file: leave one out")
    if options.prompts:
        return [_unescaped(prompt) for prompt in options.prompts]
    if options.file in (None, "-"):
        if sys.stdin is None or (options.file is None and sys.stdin.isatty()):
            raise ConfigError("no prompt: name one, or --file FILE, or write lines to standard input")
        where, read = "standard input", sys.stdin.read
    else:
        where, read = f"--file {options.file!r}", lambda: Path(options.file).read_text(encoding="utf-8-sig")
    try:
        text = read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
    # Not splitlines(), which also parts prompts at characters such as U+2028.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{where} holds no prompt: every line is empty")
    if not as_json:
        return [_unescaped(line) for _, line in numbered]
    return [_prompt_of(line, f"{where}, line {number}") for number, line in numbered]


def _prompt_of(line: str, where: str) -> str:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also an endless number, and nesting without end
        raise ConfigError(f"{where}: expected a JSON object with a prompt, found {line[:40]!r}") from error
    prompt = values.get("prompt") if isinstance(values, dict) else None
    if not isinstance(prompt, str):
        raise ConfigError(f"{where}: expected a JSON object whose prompt is a text, found {line[:40]!r}")
    return prompt


def _unescaped(prompt: str) -> str:
    return prompt.replace("\\n", "\n")


def _check_sampling(options: argparse.Namespace) -> None:
    if options.temperature is not None and not 1e-4 <= options.temperature <= 1e4:  # float32 holds what it divides
        raise ConfigError(f"--temperature is {options.temperature}: it must lie between 0.0001 and 10000")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p is {options.top_p}: it must lie above 0 and at most at 1")
    if not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed is {options.seed}: it must lie between 0 and {2**63 - 1}")


def _decoder(options: argparse.Namespace, **sampling: Any) -> "Decoder":
    import torch
    from transformers.utils import logging

    from skipdecode.device import resolve_device
    from skipdecode.loading import load
    from skipdecode.texts import Decoder

    logging.disable_progress_bar()
    device = resolve_device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, tokenizer = load(options.checkpoint, dtype, trust_remote_code=options.trust_remote_code)
    return Decoder(
        model.to(device),  # type: ignore[arg-type]
        tokenizer,
        getattr(options, "max_new_tokens", 1),
        options.weights,
        **sampling,
    )


if __name__ == "__main__":
    sys.exit(main())
