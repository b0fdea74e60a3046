"""Draw the pictures of README.md and docs/, and write their tables of results, from the figures in docs/data/.

    python scripts/draw_results.py

Run it after every change of docs/data/pretrained.csv or docs/data/gpu-speed.csv; a test checks the tables. A table
stands between `<!-- table: NAME -->` and `<!-- end -->`; the tasks, systems and targets of the file are its rows and
columns. Standard deviations over seeds are optional.
"""

import csv
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eval.drawing import EMPTY, INK, MUTED, SERIES, STYLE, draw_series, save_png  # noqa: E402
from skipdecode import SkipSchedule  # noqa: E402

DATA, IMAGES = ROOT / "docs" / "data", ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md"]
# What the quickstart trains for 3x; prompts run as many layers as the first generated token.
SCHEDULE = SkipSchedule(num_layers=12, max_layers=6, min_layers=2, horizon=34, prompt="max")
PROMPT_TOKENS, TOKENS = 16, 44
CONDITIONS = "SmolLM2-135M on E2E, 630 prompts, up to three seeds; batch 32 on a CPU"
Figures = Sequence[dict[str, str]]


def main() -> int:
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    with matplotlib.rc_context(STYLE):
        draw(IMAGES / "schedule.png", draw_schedule)
        draw(IMAGES / "quality.png", draw_quality)
        draw(IMAGES / "gpu-speed.png", draw_gpu_speed)
    return 0


def read(name: str) -> Figures:
    """The rows of a file in docs/data."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def with_tables(page: str) -> str:
    """A page with its tables written anew."""
    tables = {"by target": by_target(read("pretrained")), "by system": by_system(read("pretrained"))}
    pattern = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n{match[3]}", page)


def by_target(figures: Figures) -> str:
    """The rows of the file's first system: a line for each target, the tasks side by side."""
    rows = [row for row in figures if row["system"] == figures[0]["system"]]
    metric = {row["task"]: row["metric"] for row in rows}  # in the order of the file
    facts = {row["task"] for row in rows if row["slot_error_rate"]}
    heads, cells = ["target"], {row["target"]: [f"{row['target']}x"] for row in rows}
    for task, name in metric.items():
        heads += [f"{task}: speedup", name, *(["SER, %"] if task in facts else [])]
        of_task = {row["target"]: row for row in rows if row["task"] == task}
        for target, line in cells.items():
            row = of_task.get(target)
            line += _cells(row, task in facts) if row else ["–"] * (3 if task in facts else 2)
    return _table(heads, list(cells.values()), numbers=0)


def by_system(figures: Figures) -> str:
    """All rows as they stand in the file; task and system are named where they change."""
    heads = ["task", "system", "target", "measured speedup", "metric", "score", "SER, %"]
    lines, before = [], {"task": "", "system": ""}
    for row in figures:
        task, system = (row[key] if row[key] != before[key] else "" for key in ("task", "system"))
        before = row
        speedup, score, *facts = _cells(row, True)
        target = f"{row['target']}x" if row["target"] else "–"
        lines.append([task, system, target, speedup, row["metric"], score, *facts])
    return _table(heads, lines, numbers=2)


def _cells(row: dict[str, str], facts: bool) -> list[str]:
    """Speedup, score and, with `facts`, the slot error rate; with standard deviations where there are some."""
    texts = []
    for name in ("score", *(["slot_error_rate"] if facts else [])):
        spread = f" ± {row[f'{name}_sd']}" if row[f"{name}_sd"] else ""
        texts.append(f"{row[name]}{spread}" if row[name] else "–")
    return [f"{row['speedup']}x", *texts]


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], numbers: int) -> str:
    """A Markdown table, whose columns from `numbers` on are aligned to the right."""
    rules = [":---" if n < numbers else "---:" for n in range(len(heads))]
    return "\n".join(f"|{'|'.join(cells)}|" for cells in (heads, rules, *lines))


def draw(path: Path, fill: Callable[[Figure], None]) -> None:
    """A picture that `fill` draws; all have one size, so that two stand side by side."""
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    fill(figure)
    save_png(path, figure)


def draw_schedule(figure: Figure) -> None:
    """Which layers run for the prompt and for each generated token."""
    axes = figure.subplots()
    layers = range(1, SCHEDULE.num_layers + 1)
    cutoffs = SCHEDULE.cutoffs(TOKENS)
    for_prompt = {layer + 1 for layer in SCHEDULE.layers_at(0)}
    blue, light = SERIES[0][0], SERIES[5][0]
    axes.barh(layers, PROMPT_TOKENS + TOKENS, left=-PROMPT_TOKENS, height=0.9, color=EMPTY, linewidth=0)
    axes.barh(sorted(for_prompt), PROMPT_TOKENS, left=-PROMPT_TOKENS, height=0.9, color=light, linewidth=0)
    axes.barh(layers, cutoffs, height=0.9, color=blue, linewidth=0)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_xlim(-PROMPT_TOKENS, TOKENS)
    axes.set_ylim(0.5, SCHEDULE.num_layers + 0.5)
    axes.set_yticks([1, 3, 6, 9, 12])
    axes.set_xticks([0, 10, 20, 30, 40])
    axes.set_xlabel("generated token")
    axes.text(-PROMPT_TOKENS / 2, 0.38, "prompt", ha="center", va="top", color=INK)
    axes.set_ylabel("layer")
    axes.grid(visible=False)
    axes.set_title("Which layers run: the quickstart's model (12 layers) at 3x", pad=24)
    names = [("runs for the prompt", light), ("runs for a generated token", blue), ("skipped", EMPTY)]
    handles = [Patch(color=colour, label=label) for label, colour in names]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=3, fontsize=8.5, handlelength=1.2
    )


def draw_quality(figure: Figure) -> None:
    """BLEU and SER on E2E against the measured end-to-end speedup, a line for each system that has several targets."""
    bleu, facts = figure.subplots(2, sharex=True)
    figures = [row for row in read("pretrained") if row["task"] == "E2E"]
    for number, system in enumerate(dict.fromkeys(row["system"] for row in figures)):
        rows = [row for row in figures if row["system"] == system]
        x = [float(row["speedup"]) for row in rows]
        for axes, name in ((bleu, "score"), (facts, "slot_error_rate")):
            y, spread = [float(row[name]) for row in rows], [float(row[f"{name}_sd"] or 0) for row in rows]
            draw_series(axes, number, system, x, y, yerr=spread if any(spread) else None)
    bleu.set_ylabel("BLEU")
    bleu.set_ylim(0, 75)
    bleu.legend(loc="lower left", fontsize=8.5, ncols=2)
    bleu.set_title("Quality against speed on a pretrained model", pad=24)
    bleu.text(0, 1.06, CONDITIONS, transform=bleu.transAxes, fontsize=8.5, color=MUTED)
    facts.set_ylabel("wrong or missing\nfacts, %")
    facts.set_ylim(bottom=-0.4)
    facts.set_xlabel("measured end-to-end speedup (prefill + decode)")
    facts.set_xlim(0.8, 4.7)
    facts.xaxis.set_major_formatter("{x:g}x")


def draw_gpu_speed(figure: Figure) -> None:
    """Bars of the measured decode speedup by target, for each model and batch size; a line at each target."""
    axes = figure.subplots()
    figures = read("gpu-speed")
    groups = list(dict.fromkeys((row["model"], row["batch"]) for row in figures))
    targets = sorted({int(row["target"]) for row in figures})
    width = 0.8 / len(groups)
    for number, (model, batch) in enumerate(groups):
        rows = [row for row in figures if (row["model"], row["batch"]) == (model, batch)]
        at = [targets.index(int(row["target"])) + (number - (len(groups) - 1) / 2) * width for row in rows]
        colour = SERIES[number][0]
        bars = axes.bar(
            at, [float(row["decode"]) for row in rows], width * 0.92, color=colour, label=f"{model}, batch {batch}"
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=6.5, padding=1)
    for place, target in enumerate(targets):
        axes.hlines(target, place - 0.45, place + 0.45, color=INK, linewidth=1, linestyle="--", zorder=3)
    axes.set_xticks(range(len(targets)), [f"target {target}x" for target in targets])
    axes.set_ylabel("measured speedup (decode)")
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_ylim(0, 6)
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper left", fontsize=9)
    axes.set_title("Decode speedup on one NVIDIA H200, bfloat16", pad=22)
    note = "shapes of OPT, random weights, 64 prompt and 64 new tokens, medians of 3 repeats; dashed: target"
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=8, color=MUTED)


if __name__ == "__main__":
    sys.exit(main())
