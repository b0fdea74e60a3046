"""Train prompts in SwiftKV's way, and show its losses beside those of prompts that run the first token's layers.

    python scripts/experiments/settings.py --settings schedule.prompt=max schedule.prompt=full --seeds 0 \\
        --output outputs/long --train-only ... train.validate_rows=400
    python scripts/experiments/swiftkv.py --stop-after 6 --compare "outputs/long/schedule.prompt=max-seed-0" \\
        --recipe quickstart schedule.prompt=full schedule.texts=0 output.dir=outputs/swiftkv ... train.validate_rows=400

SwiftKV (arXiv 2410.03960, section 3.1): prompts stop after n layers, and every layer above gets its keys and values
from the state that they stopped with. A prompt's last token, from which the first new one comes, runs on. The layers'
own projections are trained with all else, from the start; the paper distils theirs from a trained model.

The table has each target's loss in the last validation, and the speed of prompt and decoding together that
multiplications and additions predict: in its layers above n a prompt is counted with keys and values alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from transformers import AutoConfig

import train.trainer
from eval.tables import Table
from skipdecode import CostModel, SkipSchedule, skip_layers
from skipdecode.checkpoint import SkipConfig
from skipdecode.command import run_command
from skipdecode.cost import Machine
from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import decoder_layers
from train.cli import main as run_training
from train.tracking import VALIDATION_FILE

ARITHMETIC = Machine(bytes_per_second=float("inf"))  # prompts, and many rows, wait for nothing else


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stop-after", type=int, required=True, metavar="N", help="layers that prompts run")
    parser.add_argument("--compare", nargs="+", type=Path, default=[], metavar="RUN", help="runs without it")
    parser.add_argument("--recipe", required=True, metavar="NAME", help="or a YAML file")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="of the recipe, output.dir=DIR among them")
    options = parser.parse_intermixed_args()
    check_counts(**{"--stop-after": options.stop_after})
    folder = next((Path(word.partition("=")[2]) for word in options.overrides if word.startswith("output.dir=")), None)
    if folder is None or "schedule.prompt=full" not in options.overrides:
        raise ConfigError("overrides must hold output.dir=DIR and schedule.prompt=full, which layers above N build on")
    missing = [run for run in options.compare if not (run / VALIDATION_FILE).exists()]
    if missing:
        raise ConfigError(f"--compare {missing[0]} has no {VALIDATION_FILE}: expected a run with train.validate_rows")
    if not (folder / "config.json").exists():
        with mock.patch.object(train.trainer, "skip_layers", partial(stopped_prompts, options.stop_after)):
            status = run_training(["--recipe", options.recipe, *options.overrides])
        if status:
            return status
    rows = [line for run in options.compare for line in lines(run, None)] + lines(folder, options.stop_after)
    print(Table(["run", "asked", "max to min", "prompt layers", "whole, predicted", "loss"], rows).to_markdown())
    return 0


@contextmanager
def stopped_prompts(
    stop_after: int, model: nn.Module, schedule: SkipSchedule, *, prompt_columns: int, **options: Any
) -> Iterator[Any]:
    """As `skip_layers`, with prompts whose states stay as they are above the first `stop_after` layers."""

    def stay(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        # The last column of the prompt is where the first new token comes from: it runs on.
        whole = torch.cat([before[:, : prompt_columns - 1], after[:, prompt_columns - 1 :]], dim=1)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    with skip_layers(model, schedule, prompt_columns=prompt_columns, **options) as gate, ExitStack() as hooks:
        for layer in decoder_layers(model)[stop_after:]:
            hooks.enter_context(removed(layer.register_forward_hook(stay, with_kwargs=True)))
        yield gate


@contextmanager
def removed(handle: Any) -> Iterator[None]:
    """While it lasts, the hook is there."""
    try:
        yield
    finally:
        handle.remove()


def lines(run: Path, stop_after: int | None) -> list[list[str]]:
    """A line for each target that a run validated."""
    losses = json.loads((run / VALIDATION_FILE).read_text(encoding="utf-8").splitlines()[-1])
    config = AutoConfig.from_pretrained(run)
    skip, sizes = SkipConfig.of(config), CostModel.of(config)
    assert skip is not None
    cost = sizes.at(**skip.conditions, machine=ARITHMETIC)
    rest = cost.num_layers - (stop_after or 0)
    # Keys and values of the layers above, of the parameters that a layer multiplies with.
    width = config.hidden_size
    shares = rest * width * sizes.cache_values / sizes.layer_parameters if stop_after else 0.0
    full = cost.seconds(SkipSchedule.full_depth(cost.num_layers), over="all")
    found = []
    for speedup, schedule in skip.schedules.items():
        layers = schedule.prompt_budget if stop_after is None else stop_after
        own = cost.decode_seconds(schedule) + cost.prefill_seconds(layers)
        own += shares * (cost.prefill_seconds(2) - cost.prefill_seconds(1))
        loss = losses[f"eval_loss_{speedup:g}x"]
        name = run.name if stop_after is None else f"SwiftKV, {stop_after}"
        budgets = f"{schedule.max_layers} to {schedule.min_layers}"
        found.append([name, f"{speedup:g}x", budgets, f"{layers}", f"{full / own:.2f}x", f"{loss:.3f}"])
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))
