"""How fast a model decodes under schedules, beside what else a user could pick: `python -m eval.speed`."""

import argparse
import datetime
import math
import operator
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from rich.progress import Progress

from configs.shapes import random_model, read_shape
from eval.console import make_console
from eval.machine import copy_bytes_per_second, describe_machine, versions
from eval.output import check_new_files
from eval.speed.peers import CTranslate2, Decoder, SkipDecode, Transformers
from eval.speed.profiles import print_profiles
from eval.speed.report import Conditions, SpeedReport, SpeedRow, draw_speeds
from skipdecode import ConfigError, CostModel, SkipSchedule, measure_cost, solve_schedule
from skipdecode.command import run_command
from skipdecode.cost import Cost
from skipdecode.device import resolve_device
from skipdecode.families import text_config
from skipdecode.files import write_whole
from skipdecode.lean import choose_weights
from skipdecode.loading import load_model
from skipdecode.loop import GenerativeModel
from skipdecode.projections import Weights
from skipdecode.ratio import Ratio

LARGEST = 1_000_000  # of rows, tokens and repeats
PEERS = ("transformers", "transformers-static", "ctranslate2")


@dataclass
class Entry:
    """One decoder in the benchmark, and its seconds in each repeat.

    `schedule` and `weights` are of skip_generate, and None for a peer.
    """

    decoder: Decoder
    speedup: float = 1.0
    schedule: SkipSchedule | None = None
    weights: Weights | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status, as `run_command` does."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _benchmark(options), left=lambda: f"{options.output} was not written")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.speed",
        description="Time decoding at several target speeds, by the wall clock: each batch size a table, every decoder "
        "taking turns, medians [quartiles]; beside it the peers on the same weights, and the bytes that a step must "
        "read over the bytes per second that a large copy reaches.",
        epilog="example: python -m eval.speed --model opt-1.3b --dtype bfloat16 --batch-size 1 8 --output speed.json",
    )
    parser.add_argument(
        "--model", required=True, metavar="SHAPE_OR_DIR", help="a shape in configs/model (random weights), or a folder"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="a .json that isn't there yet")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="of a shape; default: the family's")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="B", help="default: 1")
    parser.add_argument("--prompt-length", type=int, default=64, metavar="P", help="default: 64")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(
        "--speedup", type=float, nargs="+", default=[1, 2, 3, 4, 5], metavar="X", help="targets; 1x is added"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=get_args(Weights),
        help="kinds to time, as in skip_generate; default: what it chooses",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["transformers"], help="default: transformers")
    parser.add_argument("--repeats", type=int, default=5, metavar="R", help="default: 5")
    parser.add_argument(
        "--predict", action="store_true", help="solve for the predicted clock instead of one that is calibrated first"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print where a decode step's time goes, at full depth and at the highest target",
    )
    return parser


def _benchmark(options: argparse.Namespace) -> None:
    _check(options)
    device = resolve_device(options.device)
    model = _model(options, device)
    _check_positions(model, options)
    options.weights = options.weights or [choose_weights(model)]
    console = make_console(width=200)
    peers = _peers(options.peers, model, options.weights, device)
    rows: list[SpeedRow] = []
    unreachable: list[str] = []
    copies: list[float] = []
    profiled: list[Entry] = []
    for batch_size in options.batch_size:
        entries = _entries(model, options, batch_size, unreachable) + [Entry(peer) for peer in peers]
        ids = _prompts(model, options, batch_size)
        copies += _take_turns(entries, ids, options)
        rows += _rows(entries, CostModel.of(model), ids, options, statistics.median(copies))
        own = [entry for entry in entries if entry.weights == options.weights[0]]
        profiled = profiled or [own[0], own[-1]]
    report = SpeedReport(
        Conditions(
            model=options.model,
            parameters=sum(p.numel() for p in model.parameters()),
            dtype=options.dtype,
            device=str(device),
            prompt_length=options.prompt_length,
            new_tokens=options.new_tokens,
            repeats=options.repeats,
            calibrated=not options.predict,
            copy_bytes_per_second=statistics.median(copies),
            unreachable=unreachable,
            date=datetime.date.today().isoformat(),
            command=shlex.join(["python", "-m", "eval.speed", *sys.argv[1:]]),
            machine=describe_machine(device),
            versions=versions(),
        ),
        rows,
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw_speeds(options.output.with_suffix(".png"), report)
    write_whole(options.output.with_suffix(".md"), report.to_markdown())
    write_whole(options.output, report.to_json())
    for table in report.to_tables():
        console.print(table)
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"picture: {options.output.with_suffix('.png')}", soft_wrap=True)
    if options.profile:
        decoders = [entry.decoder for entry in profiled]
        print_profiles(decoders, _prompts(model, options, options.batch_size[0]), options.new_tokens, console)


def _check(options: argparse.Namespace) -> None:
    for name in ("batch_size", "prompt_length", "new_tokens", "repeats", "vocab_size"):
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            least = 2 if name == "new_tokens" else 1
            if number is not None and not least <= number <= LARGEST:
                raise ConfigError(f"--{name.replace('_', '-')} is {number}: it must lie between {least} and {LARGEST}")
    if not all(1 <= speedup < math.inf for speedup in options.speedup):
        raise ConfigError(f"--speedup is {options.speedup}: name different targets of 1 or more, such as 1 2 4")
    for name in ("speedup", "batch_size", "weights", "peers"):
        values = getattr(options, name) or []
        if len(set(values)) != len(values):
            raise ConfigError(f"--{name.replace('_', '-')} is {values}: name each once")
    if options.output.suffix != ".json":
        raise ConfigError(f"--output {options.output}: name a .json file; a .md and a .png are written beside it")
    check_new_files("--output", *(options.output.with_suffix(suffix) for suffix in (".json", ".md", ".png")))


def _check_positions(model: GenerativeModel, options: argparse.Namespace) -> None:
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is not None and options.prompt_length + options.new_tokens - 1 > positions:
        raise ConfigError(
            f"--prompt-length is {options.prompt_length}: with {options.new_tokens} new tokens that is beyond the "
            f"model's {positions} positions"
        )


def _model(options: argparse.Namespace, device: torch.device) -> GenerativeModel:
    dtype: torch.dtype = getattr(torch, options.dtype)
    if Path(options.model).is_dir():
        if options.vocab_size is not None:
            raise ConfigError("--vocab-size is for a shape: a checkpoint has its own")
        model = load_model(options.model, dtype, trust_remote_code=options.trust_remote_code)
    else:
        vocabulary = {"vocab_size": options.vocab_size} if options.vocab_size is not None else {}
        with torch.device(device):
            model = random_model({**read_shape(options.model, "--model"), **vocabulary}, dtype)
    model.to(device)  # type: ignore[arg-type]
    return model.eval()


def _peers(
    names: Sequence[str], model: GenerativeModel, weights: Sequence[Weights], device: torch.device
) -> list[Decoder]:
    peers: list[Decoder] = []
    if "transformers" in names:
        peers.append(Transformers(model))
    if "transformers-static" in names:
        peers.append(Transformers(model, static=True))
    if "ctranslate2" in names:
        if device.type != "cpu":
            raise ConfigError("--peers ctranslate2 is a peer on CPU: leave it out, or give --device cpu")
        # The nearest to each kind of weights: it has no bfloat16 on CPU.
        kinds = dict.fromkeys("int8" if kind == "int8" else "float32" for kind in weights)
        peers += [CTranslate2(model, kind) for kind in kinds]
    return peers


def _entries(
    model: GenerativeModel, options: argparse.Namespace, batch_size: int, unreachable: list[str]
) -> list[Entry]:
    """This library's decoders, at full depth and at each target that can be reached."""
    entries = []
    for weights in options.weights:
        conditions = {"batch_size": batch_size, "prompt_length": options.prompt_length}
        cost: Cost = (
            CostModel.of(model).at(**conditions)
            if options.predict
            else measure_cost(model, weights=weights, **conditions)
        )
        for speedup in sorted({1.0, *options.speedup}):
            try:
                schedule = solve_schedule(cost, speedup, horizon=options.new_tokens - 1)
            except ConfigError as error:
                unreachable.append(f"batch {batch_size}, {weights} weights, {speedup:g}x: {error}")
                continue
            name = f"skipdecode {speedup:g}x, {weights} weights"
            entries.append(Entry(SkipDecode(model, schedule, weights, name), speedup, schedule, weights))
    return entries


def _prompts(model: GenerativeModel, options: argparse.Namespace, batch_size: int) -> torch.Tensor:
    """Random prompts [batch, columns]."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, options.prompt_length)
    return torch.randint(4, model.config.vocab_size, shape, generator=generator).to(model.device)


def _take_turns(entries: Sequence[Entry], ids: torch.Tensor, options: argparse.Namespace) -> list[float]:
    """Time every entry once in each repeat, in an order that rotates. Returns bytes per second of copies in between."""
    copies = []
    with Progress(console=make_console(stderr=True)) as progress:
        bar = progress.add_task(f"batch {ids.shape[0]}", total=(options.repeats + 1) * len(entries))
        for repeat in range(options.repeats + 1):
            turn = repeat % len(entries)
            for entry in [*entries[turn:], *entries[:turn]]:
                warm_up = repeat == 0
                prefill, decode = entry.decoder.run(ids, min(8, options.new_tokens) if warm_up else options.new_tokens)
                if not warm_up:
                    entry.prefill.append(prefill)
                    entry.decode.append(decode)
                progress.advance(bar)
            copies.append(copy_bytes_per_second(ids.device))
    return copies


def _rows(
    entries: Sequence[Entry], cost: CostModel, ids: torch.Tensor, options: argparse.Namespace, bytes_per_second: float
) -> list[SpeedRow]:
    """A row for each of this library's decoders, beside the peers that took turns with it."""
    batch_size, steps = ids.shape[0], options.new_tokens - 1
    own = [entry for entry in entries if entry.schedule is not None]
    peers = [entry for entry in entries if entry.schedule is None]
    rows = []
    for entry in own:
        full = next(other for other in own if other.weights == entry.weights and other.speedup == 1)
        assert entry.schedule is not None  # as in all of `own`
        assert full.schedule is not None
        read = replace(cost, weight_bytes=1) if entry.weights == "int8" else cost
        bound, full_bound = (
            sum(read.step_bytes(schedule.budget(i), options.prompt_length + i, batch_size) for i in range(steps))
            / bytes_per_second
            for schedule in (entry.schedule, full.schedule)
        )
        decode = statistics.median(entry.decode)
        rows.append(
            SpeedRow(
                batch_size=batch_size,
                weights=str(entry.weights),
                speedup_target=entry.speedup,
                schedule=entry.schedule.to_dict(),
                mean_layers=entry.schedule.mean_budget(steps),
                prefill_seconds=statistics.median(entry.prefill),
                decode_seconds=decode,
                end_to_end_seconds=statistics.median(map(operator.add, entry.prefill, entry.decode)),
                tokens_per_second=batch_size * steps / decode,
                wall_clock_speedup=Ratio.of(full.decode, entry.decode),
                end_to_end_speedup=Ratio.of(
                    list(map(operator.add, full.prefill, full.decode)),
                    list(map(operator.add, entry.prefill, entry.decode)),
                ),
                over_peers={peer.decoder.name: Ratio.of(peer.decode, entry.decode) for peer in peers},
                peer_decode_seconds={peer.decoder.name: statistics.median(peer.decode) for peer in peers},
                bound_speedup=full_bound / bound,
                bandwidth_share=bound / decode,
                cache_bytes=cost.cache_bytes(entry.schedule, options.prompt_length, steps, batch_size),
                full_depth_cache_bytes=cost.cache_bytes(full.schedule, options.prompt_length, steps, batch_size),
            )
        )
    return rows
