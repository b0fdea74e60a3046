"""The layer order of a recipe's schedules: measured before training, read from a file, or given as a list."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from rich.progress import Progress, TaskProgressColumn, TimeRemainingColumn

from eval.console import bar_columns, make_console
from skipdecode import ConfigError
from skipdecode.families import decoder_layers
from skipdecode.schedule.schedule import check_order
from skipdecode.training.layer_order import ORDER_ROWS, LayerOrder, choose_rows, find_order, read_order
from train.distributed import is_first_process, on_first_process
from train.recipe import Recipe

ORDER_FILE = "order.json"  # in the folder of a run whose order was measured
AUTO = "auto"


def given_order(value: str | Sequence[int], num_layers: int, key: str) -> tuple[int, ...]:
    """The order that a recipe's key gives as a file or a list. Raises ConfigError that names the key."""
    try:
        return read_order(value, num_layers) if isinstance(value, str) else check_order(value, num_layers)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def stand_in_order(num_layers: int) -> tuple[int, ...]:
    """A placeholder order, where only the number of layers matters, such as for the cost of a schedule."""
    return (0, *range(num_layers - 1, 0, -1))


def measured_order(recipe: Recipe, model: Any, rows: datasets.Dataset, folder: Path) -> LayerOrder | None:
    """The layer order of a run with `schedule.order=auto`: saved in its folder, or else measured now.

    All processes measure the same rows, and the first one's order is used. Returns None for any other recipe. Raises
    ConfigError where the model is sharded (ZeRO-3), and for a damaged file.
    """
    if recipe.schedule.order != AUTO:
        return None
    kept = on_first_process(lambda: _kept(folder / ORDER_FILE, len(decoder_layers(model))))
    if kept is not None:
        return kept
    if any(hasattr(parameter, "ds_numel") for parameter in model.parameters()):
        raise ConfigError(
            "schedule.order is 'auto' with ZeRO-3, which shards the weights: measure the order first with "
            "`skipdecode order MODEL --output order.json`, and set schedule.order to that file"
        )
    chosen = choose_rows(rows, ORDER_ROWS, seed=recipe.train.seed)
    console = make_console(stderr=True, quiet=not is_first_process())
    with Progress(*bar_columns(), TaskProgressColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("measuring the layer order", total=None)
        found = find_order(
            model, chosen, advance=lambda done, total, _: progress.update(bar, completed=done, total=total)
        )
    return on_first_process(lambda: found)


def _kept(path: Path, num_layers: int) -> LayerOrder | None:
    if not path.exists():
        return None
    found = LayerOrder.load(path)
    check_order(found.order, num_layers)
    return found
