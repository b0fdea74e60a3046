"""A speed benchmark, from a request to its report."""

import datetime
import operator
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import GenerationConfig

from configs.shapes import random_model, read_shape
from eval.console import make_console
from eval.journal import Journal
from eval.machine import copy_bytes_per_second, describe_machine, machine_identity, versions
from eval.output import journal_of, only_benchmark
from eval.speed.peers import SkipDecode, TimedDecoder, Transformers
from eval.speed.profiles import print_profiles
from eval.speed.report import SpeedConditions, SpeedReport, SpeedRow, draw_speeds
from eval.speed.request import SpeedRequest
from eval.speed.served import CTranslate2, LlamaCpp
from skipdecode import ConfigError, CostModel, SkipSchedule, measure_cost, solve_schedule
from skipdecode.checkpoint.loading import load_model
from skipdecode.cli.device import resolve_device
from skipdecode.families import decoder_layers, longest_sequence
from skipdecode.files import write_atomically
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.request import GenerativeModel
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import Cost
from skipdecode.timing.calibrate import SHORT
from skipdecode.timing.interleave import Ratio, order_of_turn

MIN_STEPS, MIN_REPEATS = 16, 5  # of the calibration: a median of five tolerates two disturbed repeats


@dataclass
class Entry:
    """One decoder of the benchmark with its seconds in each repeat.

    `schedule` and `weights` are None for a peer.
    """

    decoder: TimedDecoder
    speedup: float = 1.0
    schedule: SkipSchedule | None = None
    weights: Weights | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def benchmark(request: SpeedRequest) -> None:
    """Time every decoder in turns; write the report as JSON, Markdown and a picture, and print it.

    An interrupted benchmark leaves the report of the batch sizes that it finished, and continues when it is started
    again: a journal beside the report holds the measurements until all are done.

    Raises ConfigError, before anything is timed, for a request that can't be met.
    """
    with only_benchmark(request.output):
        _benchmark(request)


def _benchmark(request: SpeedRequest) -> None:
    device = resolve_device(request.device)
    model = _model(request, device)
    _check_sizes(model, request)
    peers = _peers(request.peers, model, request.weights or ("model",), device)
    journal = Journal(journal_of(request.output), _identity(request, model), "benchmark")
    rows: list[SpeedRow] = []
    unreachable: list[str] = []
    copies: list[float] = []
    for batch_size in request.batch_sizes:
        plan = _plan(model, request, batch_size, journal)
        unreachable += plan["unreachable"]
        entries = [*_entries(model, plan), *(Entry(peer) for peer in peers)]
        ids = _prompts(model, request, batch_size)
        copies += _take_turns(entries, ids, request, journal)
        rows += _rows(entries, CostModel.of(model), ids, request)
        copy = statistics.median(copies)
        beside_copy = [replace(row, bandwidth_share=row.bandwidth_share / copy) for row in rows]
        report = SpeedReport(_conditions(request, model, unreachable, copy), beside_copy)
        _write(request.output, report)  # after each batch size, in case of an interruption
        if batch_size == request.batch_sizes[0]:
            own = [entry.decoder for entry in entries if entry.weights == plan["weights"][0]]
    console = make_console(width=200)
    if request.profile:
        ids = _prompts(model, request, request.batch_sizes[0])
        print_profiles([own[0], own[-1]], ids, request.new_tokens, console)
    journal.remove()
    for table in report.to_tables():
        console.print(table)
    for line in report.notes():
        console.print(line, style="dim")
    console.print(f"picture: {request.output.with_suffix('.png')}", soft_wrap=True)


def _identity(request: SpeedRequest, model: GenerativeModel) -> dict[str, Any]:
    """Everything that the times of a benchmark depend on, as JSON values."""
    options = {key: value for key, value in asdict(request).items() if key not in ("output", "profile")}
    return {
        **options,
        "sizes": asdict(CostModel.of(model)),
        "machine": machine_identity(model.device),
        "versions": versions(),
    }


def _conditions(
    request: SpeedRequest, model: GenerativeModel, unreachable: Sequence[str], bytes_per_second: float
) -> SpeedConditions:
    return SpeedConditions(
        model=request.model,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=request.dtype,
        device=str(model.device),
        prompt_length=request.prompt_length,
        new_tokens=request.new_tokens,
        repeats=request.repeats,
        over=request.over,
        calibrated=not request.predict,
        copy_bytes_per_second=bytes_per_second,
        unreachable=list(unreachable),
        date=datetime.datetime.now().isoformat(" ", "minutes"),  # minutes distinguish several runs on one day
        command=shlex.join(["python", "-m", "eval.speed", *sys.argv[1:]]),
        machine=describe_machine(model.device),
        versions=versions(),
    )


def _write(output: Path, report: SpeedReport) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    draw_speeds(output.with_suffix(".png"), report)
    write_atomically(output.with_suffix(".md"), report.to_markdown())
    write_atomically(output, report.to_json())


def _check_sizes(model: GenerativeModel, request: SpeedRequest) -> None:
    positions = longest_sequence(model.config)
    if positions is not None and request.prompt_length + request.new_tokens - 1 > positions:
        raise ConfigError(
            f"--prompt-length is {request.prompt_length}: with {request.new_tokens} new tokens it exceeds the model's "
            f"{positions} positions"
        )
    if request.prompt_stop is not None and request.prompt_stop > len(decoder_layers(model)):
        layers = len(decoder_layers(model))
        raise ConfigError(f"--prompt-stop is {request.prompt_stop}: the model has {layers} layers")


def _model(request: SpeedRequest, device: torch.device) -> GenerativeModel:
    dtype: torch.dtype = getattr(torch, request.dtype)
    if Path(request.model).is_dir():
        if request.vocab_size is not None:
            raise ConfigError("--vocab-size is for shapes: a checkpoint has its own vocabulary; leave it out")
        options: dict[str, Any] = {"gguf_file": request.gguf_file, "trust_remote_code": request.trust_remote_code}
        model = load_model(request.model, dtype, **options)
        model.generation_config = GenerationConfig()  # plain greedy decoding, which all peers support
    else:
        if request.gguf_file is not None:
            raise ConfigError(f"--gguf-file is {request.gguf_file!r}: --model must be the folder that holds it")
        vocabulary = {"vocab_size": request.vocab_size} if request.vocab_size is not None else {}
        with torch.device(device):
            model = random_model({**read_shape(request.model, "--model"), **vocabulary}, dtype)
    model.to(device)  # type: ignore[arg-type]
    return model.eval()


def _peers(
    names: Sequence[str], model: GenerativeModel, weights: Sequence[Weights], device: torch.device
) -> list[TimedDecoder]:
    on_cpu = [name for name in names if name in ("ctranslate2", "llama.cpp")]
    if on_cpu and device.type != "cpu":
        raise ConfigError(f"--peers {on_cpu[0]} runs on CPU only: leave it out, or give --device cpu")
    peers: list[TimedDecoder] = []
    if "transformers" in names:
        peers.append(Transformers(model))
    if "transformers-static" in names:
        peers.append(Transformers(model, static=True))
    if "ctranslate2" in names:
        # CTranslate2 has neither bfloat16 on CPU nor 4-bit weights, so the nearest format is timed.
        kinds = dict.fromkeys("int8" if kind.startswith("int") else "float32" for kind in weights)
        peers += [CTranslate2(model, kind) for kind in kinds]
    if "llama.cpp" in names:
        peers += [LlamaCpp(model, quantization) for quantization in ("Q8_0", "Q4_0")]
    return peers


def _plan(model: GenerativeModel, request: SpeedRequest, batch_size: int, journal: Journal) -> dict[str, Any]:
    """The weight formats, the schedules, and why targets are unreachable, as JSON values.

    They are decided once and kept in the journal: free memory and calibration may differ when a benchmark continues.
    """
    key, first = (("plan", str(size)) for size in (batch_size, request.batch_sizes[0]))
    if key in journal:
        return dict(journal[key])
    weights = request.weights or (
        journal[first]["weights"] if first in journal else (fast_path(model).usual_weights(),)
    )
    plan: dict[str, Any] = {"weights": list(weights), "schedules": [], "unreachable": []}
    for kind in weights:
        if request.predict:
            cost: Cost = CostModel.of(model).at(prompt_length=request.prompt_length, batch_size=batch_size)
        else:
            conditions: Any = {"batch_size": batch_size, "prompt_length": request.prompt_length, "weights": kind}
            # The profile covers the lengths of the benchmark, so that no cost is extrapolated.
            steps = max(MIN_STEPS, request.new_tokens - 1 - SHORT)
            cost = measure_cost(model, **conditions, repeats=max(MIN_REPEATS, request.repeats), steps=steps)
        for speedup in sorted({1.0, *request.speedups}):
            try:
                how: Any = {"over": request.over, "prompt_stop": request.prompt_stop}
                schedule = solve_schedule(cost, speedup, horizon=request.new_tokens - 1, **how)
            except ConfigError as error:
                plan["unreachable"].append(f"batch {batch_size}, {kind} weights, {speedup:g}x: {error}")
                continue
            plan["schedules"].append([kind, speedup, schedule.to_dict()])
    journal.add(key, plan)
    return plan


def _entries(model: GenerativeModel, plan: Mapping[str, Any]) -> list[Entry]:
    entries = []
    for kind, speedup, fields in plan["schedules"]:
        schedule = SkipSchedule.from_dict(fields)
        decoder = SkipDecode(model, schedule, kind, f"skipdecode {speedup:g}x, {kind} weights")
        entries.append(Entry(decoder, speedup, schedule, kind))
    return entries


def _prompts(model: GenerativeModel, request: SpeedRequest, batch_size: int) -> torch.Tensor:
    """Random prompts [batch, prompt length]."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, request.prompt_length)
    return torch.randint(4, model.config.vocab_size, shape, generator=generator).to(model.device)


def _take_turns(entries: Sequence[Entry], ids: torch.Tensor, request: SpeedRequest, journal: Journal) -> list[float]:
    """Time every entry once in each repeat, in turns; measurements in the journal aren't repeated.

    Returns the bytes per second of the memory copies between repeats.
    """
    size = str(ids.shape[0])
    keys = [
        ("turn", size, str(repeat), str(number))
        for repeat in range(request.repeats)
        for number in order_of_turn(range(len(entries)), repeat)
    ]
    if any(key not in journal for key in keys):
        # Warm-up; on a GPU all steps are needed, since there is a CUDA graph for each number of layers and of steps.
        tokens = request.new_tokens if ids.device.type == "cuda" else min(8, request.new_tokens)
        for entry in entries:
            entry.decoder.run(ids, tokens)
    copies = []
    with Progress(console=make_console(stderr=True)) as progress:
        bar = progress.add_task(f"batch {size}", total=len(keys))
        for done, key in enumerate(keys, start=1):
            entry = entries[int(key[-1])]
            prefill, decode = journal.get_or_add(key, partial(entry.decoder.run, ids, request.new_tokens))
            entry.prefill.append(prefill)
            entry.decode.append(decode)
            progress.advance(bar)
            if done % len(entries) == 0:
                copies.append(journal.get_or_add(("copy", *key[1:3]), partial(copy_bytes_per_second, ids.device)))
    return copies


def _rows(entries: Sequence[Entry], cost: CostModel, ids: torch.Tensor, request: SpeedRequest) -> list[SpeedRow]:
    """A row for each decoder of this library, with the peers that took turns with it.

    `bandwidth_share` is in bytes per second here; the caller divides by the copy bandwidth once it is known.
    """
    batch_size, steps = ids.shape[0], request.new_tokens - 1
    own = [entry for entry in entries if entry.schedule is not None]
    peers = [entry for entry in entries if entry.schedule is None]
    rows = []
    for entry in own:
        full = next(other for other in own if other.weights == entry.weights and other.speedup == 1)
        assert entry.schedule is not None  # by the selection of `own`
        assert full.schedule is not None
        read = cost.stored_as(entry.weights)
        moved, full_moved = (
            sum(read.step_bytes(schedule.budget(i), request.prompt_length + i, batch_size) for i in range(steps))
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
                prefill_over_peers={peer.decoder.name: Ratio.of(peer.prefill, entry.prefill) for peer in peers},
                peer_decode_seconds={peer.decoder.name: statistics.median(peer.decode) for peer in peers},
                peer_prefill_seconds={peer.decoder.name: statistics.median(peer.prefill) for peer in peers},
                bound_speedup=full_moved / moved,
                bandwidth_share=moved / decode,
                cache_bytes=cost.cache_bytes(entry.schedule, request.prompt_length, steps, batch_size),
                full_depth_cache_bytes=cost.cache_bytes(full.schedule, request.prompt_length, steps, batch_size),
            )
        )
    return rows
