"""What each subcommand of `skipdecode` does with its options."""

import argparse
import importlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.process import quick_imports
from skipdecode.errors import ConfigError

if TYPE_CHECKING:
    from skipdecode.timing.compare import Decoded, Decoder

API_KEY = "SKIPDECODE_API_KEY"  # the environment's, of `serve`
PLANNED_NOTE = (
    "planned: the target can't be reached by that clock, and the fastest schedule that the checkpoint was trained for "
    "runs in its place"
)

# Ends of lines to readers of Unicode texts, though not to JSON.
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\u0085\u2028\u2029"}


def generate(options: argparse.Namespace) -> int:
    """Write what follows each prompt. Returns the exit status."""
    if options.schedule is not None and (options.speedup != 1 or options.over is not None or options.strict):
        raise ConfigError("--schedule says how fast it is: leave --speedup, --over and --strict out")
    if options.stream and options.json:
        raise ConfigError("--stream writes words as they come: leave --json out")
    if options.lossless and options.over is not None and options.speedup == 1:
        raise ConfigError(f"--over is {options.over}, of a --speedup that drafts: name one, or leave --over out")
    sampling: dict[str, Any] = {"lossless": options.lossless}
    seed = options.seed or 0
    if options.temperature is not None or options.top_p is not None:
        _check_sampling(options, seed)
        sampling |= {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    elif options.seed is not None:
        raise ConfigError(f"--seed is {options.seed}, of sampling: name --temperature or --top-p, or leave it out")
    if options.order is not None and (not options.lossless or options.schedule is not None or options.speedup != 1):
        raise ConfigError("--order says which layers draft for --lossless: leave it out, or --speedup and --schedule")
    prompts = _prompts(options, as_json=options.json)
    from skipdecode.schedule.schedule import SkipSchedule

    schedule = SkipSchedule.load(options.schedule) if options.schedule is not None else None
    decoder = _decoder(options, **sampling)
    decoder.check(prompts)
    size = 1 if options.stream else options.batch_size
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    chosen = options.lossless and schedule is None and options.speedup == 1
    if schedule is None and not chosen:
        for batch in batches:
            decoder.plan_of(batch, options.speedup, options.over)  # for the errors, before anything is written
    order = None
    if options.order is not None:
        from skipdecode.families import decoder_layers
        from skipdecode.training.layer_order import read_order

        order = read_order(options.order, len(decoder_layers(decoder.model)))
    if "do_sample" in sampling:
        import torch

        torch.manual_seed(seed)
    total: Decoded | None = None
    streamer = None
    if options.stream:
        from transformers import TextStreamer

        streamer = TextStreamer(
            decoder.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    for batch in batches:
        named = decoder.draft_schedule(batch, order) if chosen else schedule
        solved = named or decoder.plan_of(batch, options.speedup, options.over).schedule
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


def info(options: argparse.Namespace) -> int:
    """Say what a checkpoint was trained for, and what each speed costs. Returns the exit status."""
    decoder = _decoder(options)
    from skipdecode.checkpoint.skip_config import DEFAULT_SPEEDUP, SkipConfig
    from skipdecode.families import longest_sequence
    from skipdecode.generate.fast_path import fast_path
    from skipdecode.schedule.cost import CostModel, count_parameters
    from skipdecode.schedule.machine_profile import describe_clock
    from skipdecode.schedule.plan import show_planned
    from skipdecode.timing.compare import price

    model = decoder.model
    positions = longest_sequence(model.config)
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
    default = getattr(model.generation_config, DEFAULT_SPEEDUP, None)
    if default is not None:
        own = str(default).removesuffix(".0")
        print(f"decodes at {own}x where it is served with its own code and nobody asks for a speed")
    trained = (sorted(remembered.schedules) if remembered is not None else []) or [1.0]
    speedups = options.speedup or (trained if len(trained) <= 8 else _spread(trained, 7))
    conditions = {"batch_size": options.batch_size, "prompt_length": options.prompt_length}
    headers = ["target", "layers", "prompt", "layers per token", "decoding", "whole", "cache MB", "trained for"]
    rows = []
    found_for = price(decoder, speedups, over=options.over, **conditions, new_tokens=options.new_tokens)
    for speedup, found in zip(speedups, found_for, strict=True):
        schedule = found.plan.schedule
        rows.append(
            [
                show_planned(speedup, found.plan.shortfall),
                f"{schedule.max_layers} to {schedule.min_layers} of {depth}",
                str(schedule.prompt_depth),
                f"{found.layers:.2f}",
                f"{found.predicted:.2f}x",
                f"{found.end_to_end:.2f}x",
                f"{found.cache_bytes / 1e6:.2f}",
                "yes" if found.trained else "no",
            ]
        )
    print()
    for line in _aligned([headers, *rows]):
        print(line)
    over = options.over or (remembered.over if remembered is not None else "decode")
    clock = describe_clock(fast_path(model).profile(options.weights))
    print(
        f"\nbatch {options.batch_size}, {options.prompt_length} prompt tokens, {options.new_tokens} new ones; targets "
        f"are of {'decoding' if over == 'decode' else 'prompt and decoding together'}; speeds by {clock}, over full "
        "depth"
    )
    if any(not found.plan.reached for found in found_for):
        print(PLANNED_NOTE)
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


def compare(options: argparse.Namespace) -> int:
    """Show prompts at several speeds side by side. Returns the exit status."""
    prompts = _prompts(options)
    decoder = _decoder(options)
    decoder.check(prompts)
    from skipdecode.schedule.plan import show_planned
    from skipdecode.timing import compare as texts

    found = texts.compare(decoder, prompts, options.speedup, options.repeats, options.over)
    names = [f"{plan.target:g}x" for plan in found.plans]
    width = max(24, (shutil.get_terminal_size().columns - 3 * (len(names) - 1)) // len(names))
    for number, prompt in enumerate(prompts):
        print(f"> {prompt.rstrip()}")
        written = [decoded.completions[number].text for decoded in found.decoded]
        for line in _side_by_side(names, written, width):
            print(line)
        print()
    if not found.paces:
        print(f"too short to be timed: no text has more than {found.tokens} token{'s' if found.tokens > 1 else ''}")
        return 0
    headers = ["target", "decoding", "whole", "layers per token", "agreement", "tokens/s", "prompts s", "decoding s"]
    rows = [
        [
            show_planned(plan.target or 1.0, plan.shortfall),
            *([str(pace.speedup), str(pace.end_to_end)] if number else ["1.00x"] * 2),
            f"{pace.layers:.2f}",
            f"{100 * agreement:.1f} %",
            f"{pace.tokens_per_second:.1f}",
            f"{pace.prefill_seconds:.3f}",
            f"{pace.decode_seconds:.3f}",
        ]
        for number, (plan, agreement, pace) in enumerate(zip(found.plans, found.agreements, found.paces, strict=True))
    ]
    for line in _aligned([headers, *rows]):
        print(line)
    print(
        "\nspeed of decoding, and of prompts and decoding together, over full depth's: median [quartiles] of "
        f"{found.rounds} rounds in turns; each goes on to {found.tokens} tokens, as many as the longest text has\n"
        "agreement: tokens of the texts above that full depth would have chosen behind what stands before them"
    )
    if any(not plan.reached for plan in found.plans):
        print(PLANNED_NOTE)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a smaller checkpoint for one speed. Returns the exit status."""
    decoder = _decoder(options)
    from skipdecode.checkpoint import export as prune
    from skipdecode.schedule.plan import show_planned

    plan = decoder.plan(options.speedup)
    found = prune.export(
        decoder.model, decoder.tokenizer, plan.schedule, options.speedup, options.output, standalone=options.standalone
    )
    saved = 1 - found.parameters / found.parameters_before
    print(
        f"{options.output}: {found.layers} of {found.layers_before} layers, {found.parameters / 1e6:.2f} of "
        f"{found.parameters_before / 1e6:.2f} M parameters ({saved:.0%} saved); made for "
        f"{show_planned(options.speedup, plan.shortfall)} alone" + (", as a plain model" if options.standalone else "")
    )
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Measure this machine's clock, and keep it. Returns the exit status."""
    output = None if options.output is None else Path(options.output)
    if output is not None:
        _check_new_file(output)
    decoder = _decoder(options)
    from skipdecode.checkpoint.skip_config import SkipConfig
    from skipdecode.timing.calibrate import measure_profile, room_for

    remembered = SkipConfig.of(decoder.model.config) or SkipConfig()
    _, most = room_for(decoder.model)
    for length in options.prompt_length or ():
        if length > most:
            raise ConfigError(
                f"--prompt-length is {length}: the model has positions for {most} at most and the texts that are timed"
            )
    lengths = {min(length, most) for length in options.prompt_length or remembered.timed_lengths()}
    sizes = set(options.batch_size)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        print(f"{done} of {options.repeats + 1} rounds of {len(sizes) * len(lengths)} batches timed", file=sys.stderr)

    measured = measure_profile(
        decoder.model,
        batch_sizes=sorted(sizes),
        prompt_lengths=sorted(lengths),
        weights=options.weights,
        repeats=options.repeats,
        advance=advance,
    )
    profile = measured.profile
    depth = profile.num_layers
    rows = [
        [
            str(batch.batch_size),
            str(batch.prompt_length),
            f"{batch.step[depth] * 1000:.2f}",
            f"{batch.step[1] * 1000:.2f}",
            f"{batch.prefill[depth] * 1000:.1f}",
            f"{batch.prefill[1] * 1000:.1f}",
            f"{spread.share:.0%}",
        ]
        for batch, spread in zip(profile.batches, measured.spreads, strict=True)
    ]
    headers = ["batch", "prompt", "ms a step", "of 1 layer", "ms of prompts", "of 1 layer", "spread"]
    for line in _aligned([headers, *rows]):
        print(line)
    print("\nspread: of the middle half of the rounds, of a step at full depth, of one layer, or of how these compare")
    if (warning := measured.warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    if output is not None:
        print(f"written to {profile.save(output)}: schedule.profile={output} trains for this machine")
    else:
        print(f"kept in {profile.save()}: speeds of this model are solved for it from now on; remove it to undo that")
    return 0


def _check_new_file(path: Path) -> None:
    """Raises ConfigError where --output names something that exists, or a file in no folder."""
    if path.exists():
        raise ConfigError(f"--output {path} exists: name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: {path.parent} is no folder")


def order(options: argparse.Namespace) -> int:
    """Find the order of a model's layers, and write it to a file. Returns the exit status."""
    output = Path(options.output)
    _check_new_file(output)
    if (options.task is None) == (options.file is None):
        raise ConfigError("the rows come from --task NAME or from --file FILE: name one of the two")
    if options.file is not None and (options.data_dir is not None or options.task_options):
        raise ConfigError("--data-dir and --task-option are of a --task: leave them out beside --file")
    import torch
    from transformers.utils.logging import tqdm

    from skipdecode.checkpoint.loading import load
    from skipdecode.cli.device import resolve_device
    from skipdecode.internals import has_bfloat16_on_cpu
    from skipdecode.training.layer_order import choose_rows, find_order

    device = resolve_device(options.device)
    fast = torch.bfloat16 if has_bfloat16_on_cpu() or device.type == "cuda" else None
    dtype = getattr(torch, options.dtype) if options.dtype else fast
    model, tokenizer = load(options.checkpoint, dtype, trust_remote_code=options.trust_remote_code)
    model.to(device)  # type: ignore[arg-type]
    rows = choose_rows(_rows(options, tokenizer), options.rows, seed=options.seed)
    with tqdm(desc="layers removed", unit=" layers") as bar:

        def advance(removed: int, total: int, divergence: float) -> None:
            bar.total = total
            bar.set_postfix_str(f"divergence {divergence:.3f}")
            bar.update()

        found = find_order(model, rows, shortlist=options.shortlist, advance=advance)
    found.save(output)
    listed = [f"{layers}: {value:.3f}" for layers, value in found.divergence.items()]
    print(f"order, the most important layer first: {' '.join(map(str, found.order))}")
    print(f"by Block Influence:                    {' '.join(map(str, found.by_influence))}")
    print("divergence from full depth by number of layers, in nats per predicted token, without any training:")
    print(textwrap.fill("  ".join(listed), 100))
    print(
        f"measured on {found.rows} rows, {found.tokens} predicted tokens, in {found.seconds:.0f} s; written to {output}"
    )
    return 0


def _rows(options: argparse.Namespace, tokenizer: Any) -> Sequence[dict[str, Any]]:
    """Rows of a task's training split, or of --file, tokenised. Raises ConfigError where they can't be read."""
    if options.file is None:
        root = Path(__file__).resolve().parents[2]
        if not (root / "data" / "rows.py").is_file():
            raise ConfigError("--task needs a checkout of the repository, which has the tasks: name rows by --file")
        sys.path.insert(0, str(root))
        rows: Sequence[dict[str, Any]] = importlib.import_module("data.rows").training_rows(
            options.task, options.data_dir, options.task_options, options.max_prompt_tokens, tokenizer
        )
        return rows
    try:
        text = Path(options.file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {options.file!r} can't be read: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"--file {options.file!r}, line {number}"
        prompt, completion = _texts_of(line, where, ("prompt", "completion"))
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        rows.append({"prompt_ids": tokenizer(prompt)["input_ids"], "completion_ids": [*ids, tokenizer.eos_token_id]})
        if not rows[-1]["prompt_ids"]:
            raise ConfigError(f"{where}: the prompt has no token")
    if not rows:
        raise ConfigError(f"--file {options.file!r} holds no row: every line is empty")
    return rows


def serve(options: argparse.Namespace) -> int:
    """Answer requests until it is told to end. Returns the exit status."""
    try:
        from skipdecode.serve import main as run
        from skipdecode.serve.settings import ServeSettings
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] == "skipdecode":
            raise
        raise ConfigError(
            f"serving needs {error.name}, which isn't installed: pip install 'skipdecode[serve]'"
        ) from error
    settings = ServeSettings(
        name=options.name or Path(os.path.abspath(options.checkpoint)).name,  # which "." has too
        speedup=options.speedup,
        over=options.over,
        strict=options.strict,
        new_tokens=min(options.max_new_tokens, options.most_new_tokens),
        most_new_tokens=options.most_new_tokens,
        timeout=options.timeout,
        drain=options.drain,
        api_key=options.api_key if options.api_key is not None else os.environ.get(API_KEY),
        allow_origins=tuple(options.allow_origin),
    )
    decoder = _decoder(options)
    from skipdecode.engine.engine import Engine

    engine = Engine(
        decoder.model,
        decoder.tokenizer,
        most_rows=options.rows,
        most_waiting=options.queue,
        cache_bytes=round(options.cache_gb * 1e9) if options.cache_gb is not None else None,
        wave_rows=options.wave_rows,
        wave_seconds=options.wave_seconds,
        weights=options.weights,
    )
    return run.run(engine, decoder.tokenizer, settings, options.host, options.port)


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
        text = read().removeprefix("\ufeff")  # of a file that another system marked
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
    # Not splitlines(), which also parts prompts at characters such as U+2028.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{where} holds no prompt: every line is empty")
    if not as_json:
        return [_unescaped(line) for _, line in numbered]
    return [_texts_of(line, f"{where}, line {number}")[0] for number, line in numbered]


def _texts_of(line: str, where: str, keys: Sequence[str] = ("prompt",)) -> list[str]:
    """The texts of a JSON object. Raises ConfigError that says where a line has none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also an endless number, and nesting without end
        raise ConfigError(
            f"{where}: expected a JSON object with a {' and a '.join(keys)}, found {line[:40]!r}"
        ) from error
    texts = []
    for key in keys:
        text = values.get(key) if isinstance(values, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{where}: expected a JSON object whose {key} is a text, found {line[:40]!r}")
        texts.append(text)
    return texts


def _unescaped(prompt: str) -> str:
    return prompt.replace("\\n", "\n")


def _check_sampling(options: argparse.Namespace, seed: int) -> None:
    if options.temperature is not None and not 1e-4 <= options.temperature <= 1e4:  # float32 holds what it divides
        raise ConfigError(f"--temperature is {options.temperature}: it must lie between 0.0001 and 10000")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p is {options.top_p}: it must lie above 0 and at most at 1")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}: it must lie between 0 and {2**63 - 1}")


def _decoder(options: argparse.Namespace, **sampling: Any) -> "Decoder":
    with quick_imports():
        import torch
        from transformers.utils import logging

        from skipdecode.checkpoint.loading import load
        from skipdecode.cli.device import resolve_device
        from skipdecode.timing.compare import Decoder

        logging.disable_progress_bar()
        device = resolve_device(options.device)
        dtype = getattr(torch, options.dtype) if options.dtype else None
        model, tokenizer = load(
            options.checkpoint, dtype, gguf_file=options.gguf_file, trust_remote_code=options.trust_remote_code
        )
    return Decoder(
        model.to(device),  # type: ignore[arg-type]
        tokenizer,
        getattr(options, "max_new_tokens", 1),
        options.weights,
        strict=getattr(options, "strict", False),
        **sampling,
    )
