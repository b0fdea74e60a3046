"""Folders such as `python -m eval` writes, by hand: texts and figures without a model."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval.results import Report, Row, Threshold, Timing
from eval.score.predictions import write_predictions
from eval.speed.report import SpeedConditions, SpeedReport, SpeedRow
from skipdecode import SkipSchedule
from skipdecode.timing.interleave import Ratio

WORDS = "abcdefghijklmno"  # of one letter each
METRICS = ("bleu", "rouge1", "rouge2", "rougeL", "slot_error_rate")


def row(speedup: float, generator: random.Random, checkpoint: str = "outputs/nowhere") -> Row:
    layers = max(1, round(8 / speedup))
    schedule = SkipSchedule(num_layers=8, max_layers=layers, min_layers=layers, horizon=16)
    scores = {name: generator.uniform(20, 80) for name in METRICS}
    measured = 1.0 if speedup == 1 else speedup * generator.uniform(0.8, 1.1)
    decoding, whole = (Ratio(speed, speed * 0.9, speed * 1.1) for speed in (measured, measured * 0.75))
    seconds = (generator.uniform(0.1, 0.2), generator.uniform(1, 2))
    return Row(
        label=f"{speedup:g}x",
        system="full depth" if speedup == 1 else "skip",
        checkpoint=checkpoint,
        num_layers=8,
        layers_per_step=float(layers),
        speedup_target=speedup,
        schedule=schedule.to_dict(),
        mean_layers=float(layers),
        scores=scores,
        prefill_seconds=generator.uniform(1, 2),
        decode_seconds=generator.uniform(1, 9),
        decode_steps=120,
        tokens=900,
        tokens_per_second=generator.uniform(100, 900),
        wall_clock_speedup=decoding.median,
        wall_clock_quartiles=(decoding.lower, decoding.upper),
        whole_speedup=whole,
        timings=[Timing(8, 24, float(layers), decoding, *seconds, generator.uniform(100, 900), whole)],
        cache_bytes=generator.randrange(10**6, 10**7),
        intervals={name: (value - 2, value + 2) for name, value in scores.items() if name != "rougeL"},
        p_values={} if speedup == 1 else {"bleu": generator.uniform(0, 1), "rougeL": 0.0001},
    )


def calm_row(threshold: Threshold, generator: random.Random, speedup: float | None = None) -> Row:
    """Confidence exits: by a threshold that was found for a target, or one that was named."""
    like = row(speedup or 2.0, generator)
    label = f"calm-{threshold.value:g}" if speedup is None else f"calm-{speedup:g}x"
    return replace(
        like,
        label=label,
        system="calm",
        speedup_target=speedup,
        schedule=None,
        threshold=threshold,
        layers_per_step=7.3,
    )


def timed(row: Row, generator: random.Random) -> Row:
    """The row with its speed at two other batch sizes."""
    timings = []
    for size in (1, 4):
        speed = row.wall_clock_speedup * generator.uniform(0.9, 1.1)
        seconds = (generator.uniform(0.1, 0.2), generator.uniform(1, 2))
        ratio = Ratio(speed, speed * 0.875, speed * 1.125)
        whole = Ratio(speed * 0.75, speed * 0.625, speed * 0.875)
        timings.append(Timing(size, 24, row.layers_per_step, ratio, *seconds, generator.uniform(100, 900), whole))
    return replace(row, timings=timings)


def save_as_before_whole_speeds(report: Report, folder: Path) -> None:
    """As a version wrote it that timed decode steps alone."""
    values = asdict(report)
    del values["over"]
    for row in values["rows"]:
        del row["whole_speedup"]
        for timing in row["timings"]:
            del timing["whole_speedup"]
    (folder / "report.json").write_text(json.dumps(values))


def sentence(generator: random.Random, length: int = 18) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(length // 2, length)))


def write_run(
    folder: Path,
    *,
    speedups: tuple[float, ...] = (1.0, 2.0, 3.0),
    examples: int = 30,
    seed: int = 0,
    text: str = "",
    data: int = 0,
    rows: Sequence[Row] | None = None,
    **changes: Any,
) -> Report:
    """A report and its predictions; `text` stands in each of these, and in each reference and prompt.

    References are those of a test set by its number, `data`, whatever the seed of the rest is.

    `rows` stand in place of those of the targets.
    """
    generator = random.Random(seed)
    checkpoint = changes.pop("checkpoint", "outputs/nowhere")
    report = Report(
        checkpoint=checkpoint,
        task="e2e",
        examples=examples,
        batch_size=8,
        max_new_tokens=24,
        dtype="float32",
        device="cpu",
        date="2026-11-21",
        command="python -m eval",
        machine={"processor": "a processor", "threads": 1},
        versions={"python": "3.11"},
        rows=list(rows or [row(speedup, generator, checkpoint) for speedup in speedups]),
    )
    report = replace(report, **changes)
    (folder / "predictions").mkdir(parents=True)
    test_set = random.Random(data)
    prompts = [
        {"id": f"test-{n}", "prompt": f"name: {n}{text}\n", "references": [sentence(test_set) + text for _ in range(3)]}
        for n in range(examples)
    ]
    for each in report.rows:
        lines = [{**prompt, "prediction": sentence(generator) + text} for prompt in prompts]
        write_predictions(folder / "predictions" / f"{each.label}.jsonl", lines)
    save(report, folder)
    return report


def write_calm_run(folder: Path, seed: int = 2) -> Report:
    """An evaluation of confidence exits with timings, and with a metric that could not be computed."""
    generator = random.Random(seed)
    found = Threshold(0.625, wanted_layers=4.0, found_layers=3.75, prompts=64)
    rows = [row(1.0, generator), calm_row(found, generator, 2.0), calm_row(Threshold(0.375), generator)]
    return write_run(
        folder,
        seed=seed,
        rows=[timed(each, generator) for each in rows],
        metrics={"bleu": "a library's BLEU, version 1", "slot_error_rate": "slots that are wrong"},
        unavailable={"meteor": "its data is not here"},
    )


def save(report: Report, folder: Path) -> None:
    """As JSON alone, which may hold what a report would refuse to say of itself."""
    (folder / "report.json").write_text(json.dumps(asdict(report)))


def speed_report(date: str = "2026-11-21") -> SpeedReport:
    """A speed benchmark at full depth and at a target of 2x."""
    ratio = Ratio(2.125, 1.875, 2.5)
    row = SpeedRow(
        batch_size=1,
        weights="packed",
        speedup_target=2.0,
        schedule=SkipSchedule(8, 5, 3).to_dict(),
        mean_layers=4.0,
        prefill_seconds=0.5,
        decode_seconds=1.5,
        end_to_end_seconds=2.0,
        tokens_per_second=64.0,
        wall_clock_speedup=ratio,
        end_to_end_speedup=ratio,
        over_peers={"peer": ratio},
        peer_decode_seconds={"peer": 3.0},
        bound_speedup=2.25,
        bandwidth_share=0.75,
        cache_bytes=4096,
        full_depth_cache_bytes=8192,
        prefill_over_peers={"peer": ratio},
        peer_prefill_seconds={"peer": 0.1},
    )
    conditions = SpeedConditions(
        model="opt",
        parameters=10**6,
        dtype="float32",
        device="cpu",
        prompt_length=8,
        new_tokens=8,
        repeats=2,
        calibrated=True,
        copy_bytes_per_second=1e9,
        unreachable=["50x: no"],
        date=date,
        command="python -m eval.speed",
        machine={"processor": "a processor", "kernels": None, "cores": 2, "threads": 2},
        versions={"torch": "2.13.0", "transformers": "5.23.0"},
    )
    return SpeedReport(conditions, [replace(row, speedup_target=1.0), row])


def predictions(folder: Path, label: str) -> list[str]:
    """The predictions of a row, in an evaluation's folder."""
    lines = (folder / "predictions" / f"{label}.jsonl").read_bytes().splitlines()
    return [json.loads(line)["prediction"] for line in lines]


def without_clocks(folder: Path) -> Any:
    """A report without times, commands and the number of processes.

    The number of drafted tokens of a lossless row depends on earlier batches of its process; its output doesn't.
    """
    report = json.loads((folder / "report.json").read_text())
    del report["command"], report["machine"]
    for row in report["rows"]:
        clocks = "seconds|per_second|wall_clock|whole_speedup|timings|processes|lossless_speedup"
        if row["system"] == "lossless":
            clocks += "|mean_layers|layers_per_step|bound_by_bytes"
        for name in [name for name in row if re.search(clocks, name)]:
            del row[name]
    return report
