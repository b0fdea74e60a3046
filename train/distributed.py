"""Processes of a run, and DeepSpeed: checks and preparation before the Trainer's arguments are made."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from configs.files import named_file
from skipdecode import ConfigError
from skipdecode.errors import first_line
from train.recipe import DEEPSPEED

T = TypeVar("T")
# Settings that the recipe sets, and for which DeepSpeed has its own defaults where its config doesn't.
_FROM_RECIPE = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_OF_OPTIMISERS, _OF_ADAM = ("lr", "weight_decay"), ("betas", "eps")


def is_first_process() -> bool:
    """Whether this process is the one that writes files and prints: torchrun's rank 0, or the only process."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


def on_first_process(work: Callable[[], T]) -> T:
    """Run `work` in the first process and return its result, or raise its error, in all of them."""
    outcome: list[Any] = [None, None]
    if is_first_process():
        try:
            outcome[0] = work()
        except (ConfigError, OSError) as error:
            outcome[1] = error
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def read_deepspeed(name: str) -> dict[str, Any]:
    """Read a DeepSpeed config by its name in configs/deepspeed/ or its path. Raises ConfigError for an invalid file."""
    path = named_file(name, DEEPSPEED, ".json", "deepspeed.config")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stage = values["zero_optimization"]["stage"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"deepspeed.config {str(path)!r}: expected a JSON object with zero_optimization.stage "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    optimizer = values.get("optimizer", {})
    parts = {name: values.get(name, {}) for name in ("fp16", "bf16")} | {"optimizer": optimizer}
    if isinstance(optimizer, dict):
        parts["optimizer.params"] = optimizer.get("params") or {}
    for name in ("offload_optimizer", "offload_param"):
        parts[f"zero_optimization.{name}"] = values["zero_optimization"].get(name) or {}
    for name, part in parts.items():
        if not isinstance(part, dict):
            wanted = "an object with a device" if "offload" in name else "an object"
            raise ConfigError(f"deepspeed.config {str(path)!r}: {name} is {part!r}, expected {wanted}")
    if stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"deepspeed.config {str(path)!r}: zero_optimization.stage is {stage!r}, expected 0, 1, 2 or 3"
        )
    if "scheduler" in values:
        raise ConfigError(
            f"deepspeed.config {str(path)!r} has a scheduler: remove it, because the recipe sets optim.scheduler"
        )
    return _left_to_recipe(values)


def _left_to_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """Set missing values to "auto", so that the recipe's are used and not DeepSpeed's defaults."""
    values = {**dict.fromkeys(_FROM_RECIPE, "auto"), **values}
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict):
        names = _OF_OPTIMISERS + (_OF_ADAM if "adam" in str(optimizer.get("type")).lower() else ())
        values["optimizer"] = {
            **optimizer,
            "params": {**dict.fromkeys(names, "auto"), **(optimizer.get("params") or {})},
        }
    return values


def prepare_deepspeed(name: str) -> dict[str, Any]:
    """Read a DeepSpeed config, and set this process up for DeepSpeed.

    Raises ConfigError where there is no such config or DeepSpeed isn't installed.
    """
    config = read_deepspeed(name)
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"deepspeed.config is {name!r}, but DeepSpeed is not installed: pip install 'skipdecode[deepspeed]'"
        ) from error
    if not torch.accelerator.is_available():
        # Don't compile, for a minute or more, an all-reduce in shared memory that gloo does as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        _launch_alone()
    return config


def _launch_alone() -> None:
    """Set torchrun's environment variables for a single process; without them DeepSpeed would look for MPI."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def check_agreement(name: str, arguments: TrainingArguments) -> None:
    """Raise ConfigError where a DeepSpeed config contradicts the recipe's precision, batch size or optimiser."""
    mismatches = arguments.hf_deepspeed_config.mismatches
    if mismatches:
        # Each is such as "- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False".
        differences = "; ".join(str(each).removeprefix("- ds ").replace(" vs hf ", " against ") for each in mismatches)
        raise ConfigError(f'deepspeed.config {name!r} contradicts the recipe: {differences}; write "auto" there')


@contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """A context in which models are built unsharded on every process, even with ZeRO-3.

    Random weights that are initialised in shards differ from those initialised whole with the same seed, and BLOOM
    can't be initialised in shards.
    """
    config = getattr(arguments, "hf_deepspeed_config", None)
    if config is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def check_world_size(checkpoint: str | os.PathLike[str], processes: int) -> None:
    """Raise ConfigError where a DeepSpeed checkpoint was written by another number of processes.

    Each process saves its own shard of the optimiser, so a run can only resume with the same number of them.
    """
    shards = len(list(Path(checkpoint).glob("global_step*/*zero_pp_rank_*_optim_states.pt")))
    if shards not in (0, processes):
        wrote = f"{shards} process{'es' if shards > 1 else ''}"
        raise ConfigError(
            f"{checkpoint} was written by {wrote}, but now there {'are' if processes > 1 else 'is'} {processes}: "
            f"continue with {shards}, or start a new run with output.dir=FOLDER"
        )
