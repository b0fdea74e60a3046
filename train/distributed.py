"""DeepSpeed beneath the Trainer: what must be so before the training arguments are made, and before a run continues."""

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
# What a recipe says and DeepSpeed has values of its own for, where its config is silent.
_RECIPES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_OF_OPTIMISERS, _OF_ADAM = ("lr", "weight_decay"), ("betas", "eps")


def is_first_process() -> bool:
    """Say whether this process is the one that writes and speaks, as torchrun says; True without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


def on_first_process(work: Callable[[], T]) -> T:
    """Do `work` in the first process and return what it gives on all; where it can't, they all raise its error."""
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
    """The DeepSpeed config of a name in configs/deepspeed/ or of a JSON file. Raises ConfigError for what isn't one."""
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
            f"deepspeed.config {str(path)!r} has a scheduler: take it out, the recipe's is optim.scheduler"
        )
    return _left_to_recipe(values)


def _left_to_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """A config with "auto" for what it doesn't say: the recipe does, and else DeepSpeed's defaults would count."""
    values = {**dict.fromkeys(_RECIPES, "auto"), **values}
    optimizer = values.get("optimizer")
    if isinstance(optimizer, dict):
        names = _OF_OPTIMISERS + (_OF_ADAM if "adam" in str(optimizer.get("type")).lower() else ())
        values["optimizer"] = {
            **optimizer,
            "params": {**dict.fromkeys(names, "auto"), **(optimizer.get("params") or {})},
        }
    return values


def prepare_deepspeed(name: str) -> dict[str, Any]:
    """The DeepSpeed config of a name, as `read_deepspeed` gives it, in a process made ready for it.

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
        # Else a minute or more of compiling, for an all-reduce in shared memory that gloo does as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        _launch_alone()
    return config


def _launch_alone() -> None:
    """Say what torchrun would to one process; DeepSpeed asks MPI where nobody says it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)


def check_agreement(name: str, arguments: TrainingArguments) -> None:
    """Raise ConfigError where a DeepSpeed config says otherwise than the recipe, of precision, batch or optimiser."""
    mismatches = arguments.hf_deepspeed_config.mismatches
    if mismatches:
        # Such as "- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False".
        disagreements = "; ".join(
            str(mismatch).removeprefix("- ds ").replace(" vs hf ", " against ") for mismatch in mismatches
        )
        raise ConfigError(f'deepspeed.config {name!r} disagrees with the recipe: {disagreements}; write "auto" there')


@contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Make a model whole on every process, also where ZeRO-3 would shard it layer by layer.

    Random weights that are made in shards are others than those made whole, from the same seed (and BLOOM's can't be).
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

    Each process keeps its own shard of the optimiser, so as many can go on as wrote it.
    """
    shards = len(list(Path(checkpoint).glob("global_step*/*zero_pp_rank_*_optim_states.pt")))
    if shards not in (0, processes):
        wrote = f"{shards} process{'es' if shards > 1 else ''}"
        raise ConfigError(
            f"{checkpoint} was written by {wrote} and there {'are' if processes > 1 else 'is'} {processes}: "
            f"continue with {shards}, or start anew with output.dir=FOLDER"
        )
