"""A speed benchmark, from a request to its report."""

import datetime
import operator
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.progress import Progress

from configs.shapes import random_model, read_shape
from eval.console import make_console
from eval.machine import copy_bytes_per_second, describe_machine, versions
from eval.speed.peers import CTranslate2, SkipDecode, TimedDecoder, Transformers
from eval.speed.profiles import print_profiles
from eval.speed.report import SpeedConditions, SpeedReport, SpeedRow, draw_speeds
from eval.speed.request import SpeedRequest
from skipdecode import ConfigError, CostModel, SkipSchedule, measure_cost, solve_schedule
from skipdecode.cost import Cost
from skipdecode.device import resolve_device
from skipdecode.families import text_config
from skipdecode.files import write_whole
from skipdecode.lean import choose_weights
from skipdecode.loading import load_model
from skipdecode.loop import GenerativeModel
from skipdecode.projections import Weights
from skipdecode.ratio import Ratio


@dataclass
class Entry:
    """One decoder in the benchmark, and its seconds in each repeat.

    `schedule` and `weights` are of skip_generate, and None for a peer.
    """

    decoder: TimedDecoder
    speedup: float = 1.0
    schedule: SkipSchedule | None = None
    weights: Weights | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def benchmark(request: SpeedRequest) -> None:
    """Time every decoder in turns; write the report as JSON, Markdown and a picture, and print it.

    Raises ConfigError, before anything is timed, for a request that can't be met.
    """
    device = resolve_device(request.device)
    model = _model(request, device)
    _check_positions(model, request)
    weights = request.weights or (choose_weights(model),)
    console = make_console(width=200)
    peers = _peers(request.peers, model, weights, device)
    rows: list[SpeedRow] = []
    unreachable: list[str] = []
    copies: list[float] = []
    profiled: list[Entry] = []
    for batch_size in request.batch_sizes:
        entries = _entries(model, request, weights, batch_size, unreachable) + [Entry(peer) for peer in peers]
        ids = _prompts(model, request, batch_size)
        copies += _take_turns(entries, ids, request)
        rows += _rows(entries, CostModel.of(model), ids, request, statistics.median(copies))
        own = [entry for entry in entries if entry.weights == weights[0]]
        profiled = profiled or [own[0], own[-1]]
    report = SpeedReport(
        SpeedConditions(
            model=request.model,
            parameters=sum(p.numel() for p in model.parameters()),
            dtype=request.dtype,
            device=str(device),
            prompt_length=request.prompt_length,
            new_tokens=request.new_tokens,
            repeats=request.repeats,
            calibrated=not request.predict,
            copy_bytes_per_second=statistics.median(copies),
            unreachable=unreachable,
            date=datetime.date.today().isoformat(),
            command=shlex.join(["python", "-m", "eval.speed", *sys.argv[1:]]),
            machine=describe_machine(device),
            versions=versions(),
        ),
        rows,
    )
    request.output.parent.mkdir(parents=True, exist_ok=True)
    draw_speeds(request.output.with_suffix(".png"), report)
    write_whole(request.output.with_suffix(".md"), report.to_markdown())
    write_whole(request.output, report.to_json())
    for table in report.to_tables():
        console.print(table)
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"picture: {request.output.with_suffix('.png')}", soft_wrap=True)
    if request.profile:
        decoders = [entry.decoder for entry in profiled]
        print_profiles(decoders, _prompts(model, request, request.batch_sizes[0]), request.new_tokens, console)


def _check_positions(model: GenerativeModel, request: SpeedRequest) -> None:
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    if positions is not None and request.prompt_length + request.new_tokens - 1 > positions:
        raise ConfigError(
            f"--prompt-length is {request.prompt_length}: with {request.new_tokens} new tokens that is beyond the "
            f"model's {positions} positions"
        )


def _model(request: SpeedRequest, device: torch.device) -> GenerativeModel:
    dtype: torch.dtype = getattr(torch, request.dtype)
    if Path(request.model).is_dir():
        if request.vocab_size is not None:
            raise ConfigError("--vocab-size is for a shape: a checkpoint has its own")
        model = load_model(request.model, dtype, trust_remote_code=request.trust_remote_code)
    else:
        vocabulary = {"vocab_size": request.vocab_size} if request.vocab_size is not None else {}
        with torch.device(device):
            model = random_model({**read_shape(request.model, "--model"), **vocabulary}, dtype)
    model.to(device)  # type: ignore[arg-type]
    return model.eval()


def _peers(
    names: Sequence[str], model: GenerativeModel, weights: Sequence[Weights], device: torch.device
) -> list[TimedDecoder]:
    peers: list[TimedDecoder] = []
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
    model: GenerativeModel,
    request: SpeedRequest,
    weights: Sequence[Weights],
    batch_size: int,
    unreachable: list[str],
) -> list[Entry]:
    """This library's decoders, at full depth and at each target that can be reached."""
    entries = []
    for kind in weights:
        if request.predict:
            cost: Cost = CostModel.of(model).at(prompt_length=request.prompt_length, batch_size=batch_size)
        else:
            cost = measure_cost(model, batch_size=batch_size, prompt_length=request.prompt_length, weights=kind)
        for speedup in sorted({1.0, *request.speedups}):
            try:
                schedule = solve_schedule(cost, speedup, horizon=request.new_tokens - 1)
            except ConfigError as error:
                unreachable.append(f"batch {batch_size}, {kind} weights, {speedup:g}x: {error}")
                continue
            name = f"skipdecode {speedup:g}x, {kind} weights"
            entries.append(Entry(SkipDecode(model, schedule, kind, name), speedup, schedule, kind))
    return entries


def _prompts(model: GenerativeModel, request: SpeedRequest, batch_size: int) -> torch.Tensor:
    """Random prompts [batch, columns]."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, request.prompt_length)
    return torch.randint(4, model.config.vocab_size, shape, generator=generator).to(model.device)


def _take_turns(entries: Sequence[Entry], ids: torch.Tensor, request: SpeedRequest) -> list[float]:
    """Time every entry once in each repeat, in an order that rotates. Returns bytes per second of copies in between."""
    copies = []
    with Progress(console=make_console(stderr=True)) as progress:
        bar = progress.add_task(f"batch {ids.shape[0]}", total=(request.repeats + 1) * len(entries))
        for repeat in range(request.repeats + 1):
            turn = repeat % len(entries)
            for entry in [*entries[turn:], *entries[:turn]]:
                warm_up = repeat == 0
                prefill, decode = entry.decoder.run(ids, min(8, request.new_tokens) if warm_up else request.new_tokens)
                if not warm_up:
                    entry.prefill.append(prefill)
                    entry.decode.append(decode)
                progress.advance(bar)
            copies.append(copy_bytes_per_second(ids.device))
    return copies


def _rows(
    entries: Sequence[Entry], cost: CostModel, ids: torch.Tensor, request: SpeedRequest, bytes_per_second: float
) -> list[SpeedRow]:
    """A row for each of this library's decoders, beside the peers that took turns with it."""
    batch_size, steps = ids.shape[0], request.new_tokens - 1
    own = [entry for entry in entries if entry.schedule is not None]
    peers = [entry for entry in entries if entry.schedule is None]
    rows = []
    for entry in own:
        full = next(other for other in own if other.weights == entry.weights and other.speedup == 1)
        assert entry.schedule is not None  # as in all of `own`
        assert full.schedule is not None
        read = replace(cost, weight_bytes=1) if entry.weights == "int8" else cost
        bound, full_bound = (
            sum(read.step_bytes(schedule.budget(i), request.prompt_length + i, batch_size) for i in range(steps))
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
                cache_bytes=cost.cache_bytes(entry.schedule, request.prompt_length, steps, batch_size),
                full_depth_cache_bytes=cost.cache_bytes(full.schedule, request.prompt_length, steps, batch_size),
            )
        )
    return rows
