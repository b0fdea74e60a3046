"""The picture of schedules: which layer runs for which generated token."""

from collections.abc import Mapping
from pathlib import Path

from eval.frontier import STYLES, save_figure
from skipdecode import SkipSchedule

SHOWN = 5  # maps at most; of more targets, as many evenly spaced ones


def draw_schedules(path: Path, schedules: Mapping[float, SkipSchedule], *, tokens: int | None = None) -> None:
    """Draw a map for each target speedup into a PNG: layers upwards, generated tokens to the right, filled where run.

    `tokens` to the right; by default a quarter more than the longest horizon.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    targets = sorted(schedules)
    if len(targets) > SHOWN:
        targets = [targets[round(n * (len(targets) - 1) / (SHOWN - 1))] for n in range(SHOWN)]
    tokens = tokens or max(round(1.25 * schedules[target].horizon) for target in targets)
    figure, panels = pyplot.subplots(
        1,
        len(targets),
        figsize=(1.2 + 1.9 * len(targets), 2.9),
        dpi=160,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    filled = ListedColormap(["#f0f0f0", STYLES[0][0]])
    for axes, target in zip(panels[0], targets, strict=True):
        schedule = schedules[target]
        ran = [[0] * tokens for _ in range(schedule.num_layers)]
        for token in range(tokens):
            for layer in schedule.layers_at(token):
                ran[layer][token] = 1
        extent = (0, tokens, 0.5, schedule.num_layers + 0.5)
        axes.imshow(ran, cmap=filled, vmin=0, vmax=1, origin="lower", aspect="auto", extent=extent)
        axes.set_title(f"{target:g}x: {schedule.mean_budget(tokens):.1f} layers", fontsize=9)
        axes.set_xlabel("generated token", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("layer", fontsize=8)
    save_figure(path, figure)
