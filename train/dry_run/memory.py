"""An estimate of the memory that a recipe needs, before it is started."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from train.distributed import read_deepspeed
from train.dry_run.simulation import SimulatedStep, simulate_step
from train.recipe import Recipe
from train.sampling import ScheduleSampler

LIVE_PARAMETERS = 1_000_000_000  # whole on a device at a time with ZeRO-3, at most: DeepSpeed's own default


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a device at its peak.

    The CUDA context, the libraries' workspaces, DeepSpeed's buckets and what the allocator can't use are not in it.

    Attributes:
        weights: with ZeRO-3, its shard and the whole parameters that are in use at a time.
        optimiser: the two moments, and with DeepSpeed the weights in float32.
        step: gradients and activations, when there are most of both together.
        host: of a machine's own memory, where DeepSpeed offloads to it.
    """

    weights: int
    optimiser: int
    step: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return self.weights + self.optimiser + self.step


def heaviest_step(
    recipe: Recipe, config: PretrainedConfig, sampler: ScheduleSampler, *, prompt_columns: int, new_tokens: int
) -> tuple[ScheduleSampler, SimulatedStep]:
    """The step that holds the most memory, simulated as `simulate_step` does, and a sampler that draws it alone."""
    found = []
    for candidate in candidate_steps(sampler, bool(recipe.optim.distillation)):
        schedules = [draw.schedule for draw in candidate.at(0)]
        simulated = simulate_step(recipe, config, schedules, prompt_columns=prompt_columns, new_tokens=new_tokens)
        found.append((candidate, simulated))
    return max(found, key=lambda each: each[1].peak())


def candidate_steps(sampler: ScheduleSampler, distils: bool) -> list[ScheduleSampler]:
    """Samplers that draw one step each, of which one holds the most memory that a step of `sampler` may hold.

    The slowest one; where a step that skips is also compared with full depth, the next one as well.
    """
    numbers = range(len(sampler.speedups))
    slowest = sorted(numbers, key=sampler.speedups.__getitem__)
    if sampler.sampling == "all":
        return [sampler]
    if sampler.sampling == "sandwich":  # whose ends are in every step
        slowest, distils = slowest[1:-1], False
    chosen = [number for number in slowest if sampler.weights[number] > 0][: 2 if distils else 1]
    alone = [tuple(float(number == each) for number in numbers) for each in chosen]
    return [replace(sampler, weights=weights) for weights in alone] or [sampler]


def estimate_memory(recipe: Recipe, simulated: SimulatedStep, world_size: int = 1) -> MemoryEstimate:
    """The memory that a recipe needs on each of `world_size` devices, all of them of one machine.

    Without DeepSpeed the optimiser, AdamW, keeps two values for each that is trained, and several processes hold the
    gradients a second time, in the buckets in which DistributedDataParallel averages them.

    Args:
        recipe: of which precision and DeepSpeed count here.
        simulated: its step, as `simulate_step` gives it.
        world_size: processes, one a device.

    Raises:
        ConfigError: for a DeepSpeed config that can't be read.
    """
    if recipe.deepspeed.config is not None:
        return _with_zero(simulated, read_deepspeed(recipe.deepspeed.config)["zero_optimization"], world_size)
    buckets = simulated.gradients if world_size > 1 else 0
    return MemoryEstimate(simulated.weights, 2 * simulated.gradients, simulated.peak() + buckets)


def _with_zero(simulated: SimulatedStep, zero: Mapping[str, Any], world_size: int) -> MemoryEstimate:
    """The estimate for a stage of ZeRO: 1 shares out the optimiser's state, 2 gradients too, 3 weights too.

    The state is 12 bytes a value, float32 weights and moments; the optimiser's step holds the gradients in float32 (4)
    as well.
    """
    stage, shard = zero["stage"], 1 / world_size
    weights, host = simulated.weights, 0
    if stage == 3:
        offloaded = _offloads(zero, "offload_param")
        host += weights if offloaded else 0
        if offloaded or world_size > 1:
            whole = weights * min(1.0, LIVE_PARAMETERS / simulated.parameters)
            weights = min(weights, int(whole + (0 if offloaded else weights * shard)))
    if _offloads(zero, "offload_optimizer"):
        host += 16 * simulated.trainable
        return MemoryEstimate(weights, 0, simulated.peak(0.0 if stage >= 2 else 1.0), host)
    state = int(simulated.trainable * (shard if stage >= 1 else 1.0))
    share = shard if stage >= 2 else 1.0
    step = max(simulated.peak(share), int(simulated.gradients * share) + 4 * state)
    return MemoryEstimate(weights, 12 * state, step, host)


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    """Tell whether a part is kept in the machine's own memory."""
    return bool((zero.get(key) or {}).get("device", "none") != "none")
