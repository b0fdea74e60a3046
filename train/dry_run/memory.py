"""An estimate of the memory that a recipe needs, made before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from skipdecode.training.sampling import ScheduleSampler
from train.distributed import read_deepspeed
from train.dry_run.simulation import SimulatedStep, simulate_step
from train.recipe import Recipe

LIVE_PARAMETERS = 1_000_000_000  # maximum number of gathered parameters on a device with ZeRO-3: DeepSpeed's default


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a device, in bytes.

    It doesn't include the CUDA context, the libraries' workspaces, DeepSpeed's buckets and the allocator's
    fragmentation.

    Attributes:
        weights: the weights; with ZeRO-3, a shard and the gathered parameters.
        optimiser: the two moments of AdamW, and with DeepSpeed the weights in float32.
        step: gradients and activations, at the peak of their sum.
        host: main memory, where DeepSpeed offloads to it.
    """

    weights: int
    optimiser: int
    step: int
    host: int = 0

    @property
    def total(self) -> int:
        """Peak memory of the device, in bytes."""
        return self.weights + self.optimiser + self.step


def heaviest_step(
    recipe: Recipe, config: PretrainedConfig, sampler: ScheduleSampler, *, prompt_columns: int, new_tokens: int
) -> tuple[ScheduleSampler, SimulatedStep]:
    """The simulation of the step with the highest peak memory, and a sampler that always draws that step.

    Args:
        recipe: the recipe of the run.
        config: the model's config.
        sampler: the run's sampler.
        prompt_columns: length of the longest prompt, in tokens.
        new_tokens: length of the longest completion, in tokens.
    """
    found = []
    for candidate in candidate_steps(sampler, bool(recipe.optim.distillation)):
        schedules = [draw.schedule for draw in candidate.at(0)]
        simulated = simulate_step(recipe, config, schedules, prompt_columns=prompt_columns, new_tokens=new_tokens)
        found.append((candidate, simulated))
    return max(found, key=lambda each: each[1].peak())


def candidate_steps(sampler: ScheduleSampler, distils: bool) -> list[ScheduleSampler]:
    """Samplers that draw one step each; one of these steps has the highest peak memory of all steps of `sampler`.

    That is the slowest schedule; with distillation, where schedules that skip also run the teacher, possibly the next.
    """
    numbers = range(len(sampler.speedups))
    slowest = sorted(numbers, key=sampler.speedups.__getitem__)
    if sampler.sampling == "all":
        return [sampler]
    if sampler.sampling == "sandwich":  # the slowest and the fastest are in every step
        slowest, distils = slowest[1:-1], False
    chosen = [number for number in slowest if sampler.weights[number] > 0][: 2 if distils else 1]
    alone = [tuple(float(number == each) for number in numbers) for each in chosen]
    return [replace(sampler, weights=weights) for weights in alone] or [sampler]


def estimate_memory(recipe: Recipe, simulated: SimulatedStep, world_size: int = 1) -> MemoryEstimate:
    """The memory that a recipe needs on each device of one machine.

    Without DeepSpeed, AdamW keeps two values for each trained one, and with several processes DistributedDataParallel
    holds the gradients a second time, in the buckets in which it averages them.

    Args:
        recipe: the recipe, whose precision and DeepSpeed config matter here.
        simulated: its step, from `simulate_step`.
        world_size: number of processes, one for each device.

    Raises:
        ConfigError: for a DeepSpeed config that can't be read.
    """
    if recipe.deepspeed.config is not None:
        return _with_zero(simulated, read_deepspeed(recipe.deepspeed.config)["zero_optimization"], world_size)
    buckets = simulated.gradients if world_size > 1 else 0
    return MemoryEstimate(simulated.weights, 2 * simulated.gradients, simulated.peak() + buckets)


def _with_zero(simulated: SimulatedStep, zero: Mapping[str, Any], world_size: int) -> MemoryEstimate:
    """The estimate for a stage of ZeRO: 1 shards the optimiser's state, 2 also the gradients, 3 also the weights.

    The state is 12 bytes per value (weights and two moments in float32); the optimiser's step also holds the gradients
    in float32, 4 bytes per value.
    """
    stage, shard = zero["stage"], 1 / world_size
    weights, host = simulated.weights, 0
    if stage == 3:
        offloaded = _offloads(zero, "offload_param")
        host += weights if offloaded else 0
        if offloaded or world_size > 1:
            gathered = weights * min(1.0, LIVE_PARAMETERS / simulated.parameters)
            weights = min(weights, int(gathered + (0 if offloaded else weights * shard)))
    if _offloads(zero, "offload_optimizer"):
        host += 16 * simulated.trainable
        return MemoryEstimate(weights, 0, simulated.peak(0.0 if stage >= 2 else 1.0), host)
    state = int(simulated.trainable * (shard if stage >= 1 else 1.0))
    share = shard if stage >= 2 else 1.0
    step = max(simulated.peak(share), int(simulated.gradients * share) + 4 * state)
    return MemoryEstimate(weights, 12 * state, step, host)


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    """Whether a part is kept in main memory."""
    return bool((zero.get(key) or {}).get("device", "none") != "none")
