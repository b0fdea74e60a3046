"""Folders such as `python -m eval` writes, by hand: texts and figures without a model."""

import json
import random
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from eval.results import Report, Row, write_predictions
from skipdecode import SkipSchedule

WORDS = "abcdefghijklmno"  # of one letter each
METRICS = ("bleu", "rouge1", "rouge2", "rougeL", "slot_error_rate")


def row(speedup: float, generator: random.Random, checkpoint: str = "outputs/nowhere") -> Row:
    layers = max(1, round(8 / speedup))
    schedule = SkipSchedule(num_layers=8, max_layers=layers, min_layers=layers, horizon=16)
    scores = {name: generator.uniform(20, 80) for name in METRICS}
    measured = 1.0 if speedup == 1 else speedup * generator.uniform(0.8, 1.1)
    values = {
        "label": f"{speedup:g}x",
        "system": "full depth" if speedup == 1 else "skip",
        "checkpoint": checkpoint,
        "num_layers": 8,
        "layers_per_step": float(layers),
        "speedup_target": speedup,
        "schedule": schedule.to_dict(),
        "mean_layers": float(layers),
        "scores": scores,
        "prefill_seconds": generator.uniform(1, 2),
        "decode_seconds": generator.uniform(1, 9),
        "decode_steps": 120,
        "tokens": 900,
        "tokens_per_second": generator.uniform(100, 900),
        "wall_clock_speedup": measured,
        "wall_clock_quartiles": (measured * 0.9, measured * 1.1),
        "cache_bytes": generator.randrange(10**6, 10**7),
        "intervals": {name: (value - 2, value + 2) for name, value in scores.items() if name != "rougeL"},
        "p_values": {} if speedup == 1 else {"bleu": generator.uniform(0, 1), "rougeL": 0.0001},
    }
    known = {field.name for field in fields(Row)}  # not all of them are written by every version
    return Row(**{name: value for name, value in values.items() if name in known})


def sentence(generator: random.Random, length: int = 18) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(length // 2, length)))


def write_run(
    folder: Path,
    *,
    speedups: tuple[float, ...] = (1.0, 2.0, 3.0),
    examples: int = 30,
    seed: int = 0,
    text: str = "",
    **changes: Any,
) -> Report:
    """A report and its predictions; `text` stands in each of these, and in each reference and prompt."""
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
        rows=[row(speedup, generator, checkpoint) for speedup in speedups],
    )
    report = replace(report, **changes)
    (folder / "predictions").mkdir(parents=True)
    prompts = [
        {
            "id": f"test-{n}",
            "prompt": f"name: {n}{text}\n",
            "references": [sentence(generator) + text for _ in range(3)],
        }
        for n in range(examples)
    ]
    for each in report.rows:
        lines = [{**prompt, "prediction": sentence(generator) + text} for prompt in prompts]
        write_predictions(folder / "predictions" / f"{each.speedup_target:g}x.jsonl", lines)
    save(report, folder)
    return report


def save(report: Report, folder: Path) -> None:
    """As JSON alone, which may hold what a report would refuse to say of itself."""
    (folder / "report.json").write_text(json.dumps(asdict(report)))
