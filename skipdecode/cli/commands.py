"""The subcommands of `skipdecode`."""

import argparse
import importlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.process import quick_imports
from skipdecode.errors import ConfigError

if TYPE_CHECKING:
    from skipdecode.timing.compare import Decoded, Decoder

PLANNED_NOTE = (
    "planned: this target can't be reached, and the fastest schedule that the checkpoint was trained for runs in its "
    "place"
)

# JSON permits these characters in strings, but many readers take them for ends of lines.
_LINE_ENDS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\u0085\u2028\u2029"}


def generate(options: argparse.Namespace) -> int:
    """Write the completion of each prompt. Returns the exit status."""
    sampling = _decoding_settings(options)
    prompts = _prompts(options, as_json=options.json)
    from skipdecode.schedule.schedule import SkipSchedule

    schedule = SkipSchedule.load(options.schedule) if options.schedule is not None else None
    decoder = _decoder(options, **sampling)
    decoder.check(prompts)
    size = 1 if options.stream else options.batch_size
    batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    choose_draft = options.lossless and schedule is None and options.speedup == 1
    if schedule is None and not choose_draft:
        for batch in batches:
            decoder.plan_of(batch, options.speedup, options.over)  # raises errors before anything is written
    order = None
    if options.order is not None:
        from skipdecode.families import decoder_layers
        from skipdecode.training.layer_order import read_order

        order = read_order(options.order, len(decoder_layers(decoder.model)))
    if "do_sample" in sampling:
        import torch

        torch.manual_seed(options.seed or 0)
    total: Decoded | None = None
    streamer = None
    if options.stream:
        from transformers import TextStreamer

        streamer = TextStreamer(
            decoder.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    for batch in batches:
        given = decoder.draft_schedule(batch, order) if choose_draft else schedule
        solved = given or decoder.plan_of(batch, options.speedup, options.over).schedule
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
    print(
        f"{total.layers_per_token:.2f} of {solved.num_layers} layers per token, {total.tokens_per_second:.1f} tokens/s "
        f"(prefill {total.prefill_seconds:.2f} s, decoding {total.decode_seconds:.2f} s)",
        file=sys.stderr,
    )
    return 0


def _decoding_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the Decoder for `generate`. Raises ConfigError for options that exclude each other."""
    if options.schedule is not None and (options.speedup != 1 or options.over is not None or options.strict):
        raise ConfigError("--schedule replaces a target speedup: leave --speedup, --over and --strict out")
    if options.stream and options.json:
        raise ConfigError("--stream writes plain text as it is generated: leave --json out")
    if options.lossless and options.over is not None and options.speedup == 1:
        raise ConfigError(f"--over is {options.over} without --speedup: give a --speedup above 1, or leave --over out")
    if options.order is not None and (not options.lossless or options.schedule is not None or options.speedup != 1):
        raise ConfigError(
            "--order needs --lossless, and chooses the layers that draft: leave --speedup and --schedule out"
        )
    if options.temperature is None and options.top_p is None:
        if options.seed is not None:
            raise ConfigError(f"--seed is {options.seed} without sampling: give --temperature or --top-p too")
        return {"lossless": options.lossless}
    # float32 must hold the scores after their division by the temperature.
    if options.temperature is not None and not 1e-4 <= options.temperature <= 1e4:
        raise ConfigError(f"--temperature is {options.temperature}: it must be between 0.0001 and 10000")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p is {options.top_p}: it must be above 0, and 1 or less")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed is {options.seed}: it must be between 0 and {2**63 - 1}")
    sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    return {"lossless": options.lossless, **sampling}


def info(options: argparse.Namespace) -> int:
    """Show what a checkpoint was trained for, and what each speedup costs. Returns the exit status."""
    decoder = _decoder(options)
    from skipdecode.checkpoint.skip_config import DEFAULT_SPEEDUP, SkipConfig
    from skipdecode.families import longest_sequence
    from skipdecode.generate.fast_path import fast_path
    from skipdecode.schedule.cost import CostModel, count_parameters
    from skipdecode.schedule.machine_profile import describe_cost_model
    from skipdecode.schedule.plan import show_planned
    from skipdecode.timing.compare import price

    model = decoder.model
    positions = longest_sequence(model.config)
    if positions is not None and options.prompt_length > positions:
        raise ConfigError(f"--prompt-length is {options.prompt_length}: the model has {positions} positions")
    config = SkipConfig.of(model.config)
    depth = CostModel.of(model).num_layers
    parameters = count_parameters(model.parameters())
    print(f"{options.checkpoint}: {model.config.model_type}, {depth} layers, {parameters / 1e6:.1f} M parameters")
    if config is None:
        print("its config names no schedules that it was trained for: expect good output at full depth only")
    else:
        _print_training(config)
    default = getattr(model.generation_config, DEFAULT_SPEEDUP, None)
    if default is not None:
        own = str(default).removesuffix(".0")
        print(f"decodes at {own}x by default if it is loaded with its own code (trust_remote_code)")
    trained = (sorted(config.schedules) if config is not None else []) or [1.0]
    speedups = options.speedup or (trained if len(trained) <= 8 else _spread(trained, 7))
    conditions = {"batch_size": options.batch_size, "prompt_length": options.prompt_length}
    headers = ["target", "layers", "prompt layers", "mean layers"]
    headers += ["speedup (decode)", "speedup (end-to-end)", "cache MB", "trained for"]
    rows = []
    prices = price(decoder, speedups, over=options.over, **conditions, new_tokens=options.new_tokens)
    for speedup, cost in zip(speedups, prices, strict=True):
        schedule = cost.plan.schedule
        rows.append(
            [
                show_planned(speedup, cost.plan.fallback_speedup),
                f"{schedule.max_layers} to {schedule.min_layers} of {depth}",
                str(schedule.prompt_depth),
                f"{cost.layers:.2f}",
                f"{cost.predicted:.2f}x",
                f"{cost.end_to_end:.2f}x",
                f"{cost.cache_bytes / 1e6:.2f}",
                "yes" if cost.trained else "no",
            ]
        )
    print()
    for line in _aligned([headers, *rows]):
        print(line)
    over = options.over or (config.over if config is not None else "decode")
    clock = describe_cost_model(fast_path(model).profile(options.weights))
    print(
        f"\nbatch size {options.batch_size}, {options.prompt_length} prompt tokens, {options.new_tokens} new tokens; "
        f"targets refer to {'decoding' if over == 'decode' else 'prefill and decoding together'}; speedups over full "
        f"depth, by {clock}"
    )
    if any(not cost.plan.reached for cost in prices):
        print(PLANNED_NOTE)
    return 0


def _print_training(config: Any) -> None:
    speeds = config.trained_range
    if speeds is not None:
        drawn = f"{speeds[0]:g}x" if speeds[0] == speeds[1] else f"{speeds[0]:g}x to {speeds[1]:g}x"
        print(f"trained for {drawn} ({len(config.schedules)} schedules)")
    if config.task.get("name"):
        print(f"on the task {config.task['name']}")
    if config.task.get("example"):
        print(f"with prompts such as {json.dumps(config.task['example'], ensure_ascii=False)}")


def _spread(values: Sequence[float], count: int) -> list[float]:
    return [values[round(n * (len(values) - 1) / (count - 1))] for n in range(count)]


def compare(options: argparse.Namespace) -> int:
    """Show the outputs and times of several speedups side by side. Returns the exit status."""
    prompts = _prompts(options)
    decoder = _decoder(options)
    decoder.check(prompts)
    from skipdecode.schedule.plan import show_planned
    from skipdecode.timing.compare import compare as compare_speedups

    comparison = compare_speedups(decoder, prompts, options.speedup, options.repeats, options.over)
    names = [f"{plan.target:g}x" for plan in comparison.plans]
    width = max(24, (shutil.get_terminal_size().columns - 3 * (len(names) - 1)) // len(names))
    for number, prompt in enumerate(prompts):
        print(f"> {prompt.rstrip()}")
        outputs = [decoded.completions[number].text for decoded in comparison.decoded]
        for line in _side_by_side(names, outputs, width):
            print(line)
        print()
    if not comparison.paces:
        length = f"{comparison.tokens} token{'s' if comparison.tokens > 1 else ''}"
        print(f"the outputs are too short to be timed: none has more than {length}")
        return 0
    headers = ["target", "speedup (decode)", "speedup (end-to-end)", "mean layers", "agreement", "tokens/s"]
    headers += ["prefill s", "decoding s"]
    rows = [
        [
            show_planned(plan.target or 1.0, plan.fallback_speedup),
            *([str(pace.speedup), str(pace.end_to_end)] if number else ["1.00x"] * 2),
            f"{pace.layers:.2f}",
            f"{100 * agreement:.1f} %",
            f"{pace.tokens_per_second:.1f}",
            f"{pace.prefill_seconds:.3f}",
            f"{pace.decode_seconds:.3f}",
        ]
        for number, (plan, agreement, pace) in enumerate(
            zip(comparison.plans, comparison.agreements, comparison.paces, strict=True)
        )
    ]
    for line in _aligned([headers, *rows]):
        print(line)
    print(
        "\nspeedup of decoding, and end-to-end (prefill and decoding), over full depth: median [quartiles] of "
        f"{comparison.rounds} interleaved rounds, with {comparison.tokens} tokens in every sequence, as in the longest "
        "output\n"
        "agreement: share of the output's tokens that full depth would choose too, given the tokens before them"
    )
    if any(not plan.reached for plan in comparison.plans):
        print(PLANNED_NOTE)
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a smaller checkpoint for one speedup. Returns the exit status."""
    decoder = _decoder(options)
    from skipdecode.checkpoint.export import export as export_checkpoint
    from skipdecode.schedule.plan import show_planned

    plan = decoder.plan(options.speedup)
    exported = export_checkpoint(
        decoder.model, decoder.tokenizer, plan.schedule, options.speedup, options.output, standalone=options.standalone
    )
    saved = 1 - exported.parameters / exported.parameters_before
    print(
        f"{options.output}: {exported.layers} of {exported.layers_before} layers, {exported.parameters / 1e6:.2f} of "
        f"{exported.parameters_before / 1e6:.2f} M parameters ({saved:.0%} saved), for "
        f"{show_planned(options.speedup, plan.fallback_speedup)} only"
        + (", as a plain model" if options.standalone else "")
    )
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Time a model on this machine and save the profile. Returns the exit status."""
    output = None if options.output is None else Path(options.output)
    if output is not None:
        _check_new_file(output)
    decoder = _decoder(options)
    from skipdecode.checkpoint.skip_config import SkipConfig
    from skipdecode.timing.calibrate import measure_profile, room_for

    config = SkipConfig.of(decoder.model.config) or SkipConfig()
    _, max_length = room_for(decoder.model)
    for length in options.prompt_length or ():
        if length > max_length:
            raise ConfigError(
                f"--prompt-length is {length}: it must be at most {max_length}, so that the model has positions for "
                "the new tokens that are timed"
            )
    lengths = {min(length, max_length) for length in options.prompt_length or config.timed_lengths()}
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
    headers = ["batch size", "prompt length", "ms per step", "with 1 layer", "ms of prefill", "with 1 layer", "spread"]
    for line in _aligned([headers, *rows]):
        print(line)
    print(
        "\nspread: interquartile range over the rounds, the largest of: a full step, a step of one layer, their ratio"
    )
    if (warning := measured.warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    if output is not None:
        print(f"written to {profile.save(output)}: train for this machine with schedule.profile={output}")
    else:
        print(
            f"written to {profile.save()}: speedups of this model are solved for it from now on; delete it to undo that"
        )
    return 0


def _check_new_file(path: Path) -> None:
    """Raise ConfigError if --output exists or its folder doesn't."""
    if path.exists():
        raise ConfigError(f"--output {path} exists already: name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: {path.parent} is not a folder")


def order(options: argparse.Namespace) -> int:
    """Rank the layers of a model by importance, and write the order to a file. Returns the exit status."""
    output = Path(options.output)
    _check_new_file(output)
    if (options.task is None) == (options.file is None):
        raise ConfigError("give the rows by either --task NAME or --file FILE")
    if options.file is not None and (options.data_dir is not None or options.task_options):
        raise ConfigError("--data-dir and --task-option belong to --task: leave them out with --file")
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
    rows = choose_rows(_rows(options, model, tokenizer), options.rows, seed=options.seed)
    with tqdm(desc="layers removed", unit=" layers") as bar:

        def advance(removed: int, total: int, divergence: float) -> None:
            bar.total = total
            bar.set_postfix_str(f"divergence {divergence:.3f}")
            bar.update()

        ranking = find_order(model, rows, shortlist=options.shortlist, advance=advance)
    ranking.save(output)
    listed = [f"{layers}: {value:.3f}" for layers, value in ranking.divergence.items()]
    print(f"order, the most important layer first: {' '.join(map(str, ranking.order))}")
    print(f"order by Block Influence:              {' '.join(map(str, ranking.by_influence))}")
    print("divergence from full depth by number of layers, in nats per predicted token, without any training:")
    print(textwrap.fill("  ".join(listed), 100))
    print(
        f"measured on {ranking.rows} rows with {ranking.tokens} predicted tokens in {ranking.seconds:.0f} s; "
        f"written to {output}"
    )
    return 0


def _rows(options: argparse.Namespace, model: Any, tokenizer: Any) -> Sequence[dict[str, Any]]:
    """The tokenised rows of a task's training split or of --file. Raises ConfigError if they can't be read."""
    from skipdecode.generate.stopping import end_tokens

    if options.file is None:
        root = Path(__file__).resolve().parents[2]
        if not (root / "data" / "rows.py").is_file():
            raise ConfigError("--task needs a checkout of the repository, which has the tasks; without one, use --file")
        sys.path.insert(0, str(root))
        rows: Sequence[dict[str, Any]] = importlib.import_module("data.rows").training_rows(
            options.task,
            options.data_dir,
            options.task_options,
            options.max_prompt_tokens,
            tokenizer,
            end_tokens(model, tokenizer),
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
        prompt, completion = _strings_of(line, where, ("prompt", "completion"))
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        rows.append({"prompt_ids": tokenizer(prompt)["input_ids"], "completion_ids": [*ids, tokenizer.eos_token_id]})
        if not rows[-1]["prompt_ids"]:
            raise ConfigError(f"{where}: the prompt has no token")
    if not rows:
        raise ConfigError(f"--file {options.file!r} has no rows: every line is empty")
    return rows


def serve(options: argparse.Namespace) -> int:
    """Run the server until SIGTERM or Ctrl-C. Returns the exit status."""
    try:
        with quick_imports():
            from skipdecode.serve.main import load_engine, run
            from skipdecode.serve.settings import ServerOptions

            if options.replicas is not None:
                from skipdecode.serve.ray import run_replicas
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        if missing == "skipdecode":
            raise
        what, extra = ("--replicas", "ray") if missing == "ray" else ("serving", "serve")
        raise ConfigError(
            f"{what} needs {error.name}, which isn't installed: pip install 'skipdecode[{extra}]'"
        ) from error
    from skipdecode.cli.device import resolve_device

    server = ServerOptions(**{field.name: getattr(options, field.name) for field in fields(ServerOptions)})
    if options.replicas is not None:
        return run_replicas(server, options.host, options.port)
    device = resolve_device(options.device)
    settings = server.settings()
    engine, tokenizer = load_engine(server, device)
    return run(engine, tokenizer, settings, options.host, options.port)


def _side_by_side(headers: Sequence[str], outputs: Sequence[str], width: int) -> list[str]:
    wrapped = [
        [header, *(line for part in text.strip().splitlines() for line in textwrap.wrap(part, width) or [""])]
        for header, text in zip(headers, outputs, strict=True)
    ]
    height = max(map(len, wrapped))
    padded = [lines + [""] * (height - len(lines)) for lines in wrapped]
    return [" | ".join(line.ljust(width) for line in row).rstrip() for row in zip(*padded, strict=True)]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _prompts(options: argparse.Namespace, *, as_json: bool = False) -> list[str]:
    """The prompts of the arguments, of --file or of standard input. Raises ConfigError if there are none."""
    if options.prompts and options.file is not None:
        raise ConfigError("prompts are given both as arguments and by --file: use only one")
    if options.prompts:
        return [prompt.replace("\\n", "\n") for prompt in options.prompts]
    if options.file in (None, "-"):
        if sys.stdin is None or (options.file is None and sys.stdin.isatty()):
            raise ConfigError("no prompts: give them as arguments, by --file FILE, or on standard input")
        where, read = "standard input", sys.stdin.read
    else:
        where, read = f"--file {options.file!r}", lambda: Path(options.file).read_text(encoding="utf-8-sig")
    try:
        text = read().removeprefix("\ufeff")  # a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
    # Not splitlines(), which also splits at characters such as U+2028.
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{where} has no prompts: every line is empty")
    if not as_json:
        return [line.replace("\\n", "\n") for _, line in numbered]
    return [_strings_of(line, f"{where}, line {number}")[0] for number, line in numbered]


def _strings_of(line: str, where: str, keys: Sequence[str] = ("prompt",)) -> list[str]:
    """The strings at these keys of a line of JSON. Raises ConfigError if the line doesn't have them."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # for invalid JSON, very long numbers, and deep nesting
        raise ConfigError(
            f"{where}: expected a JSON object with a {' and a '.join(keys)}, found {line[:40]!r}"
        ) from error
    strings = []
    for key in keys:
        text = values.get(key) if isinstance(values, dict) else None
        if not isinstance(text, str):
            raise ConfigError(f"{where}: expected a JSON object whose {key} is a string, found {line[:40]!r}")
        strings.append(text)
    return strings


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
