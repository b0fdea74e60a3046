"""The systems that an evaluation compares."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from eval.decoding import batches_of_like_length
from eval.journal import Journal
from eval.loading import Loaded
from eval.request import Request
from eval.results import Threshold
from eval.systems.base import Checkpoint, LosslessSystem, SkipSystem, System
from eval.systems.calm import CalmSystem
from eval.systems.threshold import PROBES, calibrated_threshold
from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.fast_path import fast_path
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import depth_mismatch
from skipdecode.schedule.lengths import Lengths
from skipdecode.schedule.machine_profile import Profile, describe_cost_model
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.timing.calibrate import measure_profile

_PLAN = ("plan",)


@dataclass(frozen=True)
class Plan:
    """Decisions made when an evaluation starts and kept when it is resumed, since memory and profile may differ then.

    Attributes:
        weights: the weight format of decode steps.
        schedules: batch size -> target speedup -> the schedule and its predicted speedup.
        drafts: the same for the drafts of lossless decoding.
        clock: a description of the cost model or profile that schedules were solved with.
    """

    weights: Weights
    schedules: dict[int, dict[float, SpeedPlan]]
    drafts: dict[int, dict[float, SpeedPlan]]
    clock: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for the journal."""
        solved = {
            name: [
                [size, speedup, one.schedule.to_dict(), one.speedup, one.limit]
                for size, found in by_size.items()
                for speedup, one in found.items()
            ]
            for name, by_size in (("schedules", self.schedules), ("drafts", self.drafts))
        }
        return {"weights": self.weights, **solved, "clock": self.clock}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """The plan that `to_dict` described."""
        solved: dict[str, dict[int, dict[float, SpeedPlan]]] = {"schedules": {}, "drafts": {}}
        for name, by_size in solved.items():
            for size, target, schedule, speedup, limit in values[name]:
                found = SpeedPlan(SkipSchedule.from_dict(schedule), float(target), speedup, limit, values["clock"])
                by_size.setdefault(size, {})[float(target)] = found
        return cls(values["weights"], **solved, clock=values["clock"])

    def warnings(self) -> list[str]:
        """A warning for each target that can't be reached, at the first batch size where that is so."""
        missed: dict[float | None, str] = {}
        for by_size in (self.schedules, self.drafts):
            for size, found in by_size.items():
                for one in found.values():
                    if not one.reached:
                        missed.setdefault(one.target, f"at batch {size}, {one.warning()}")
        return list(missed.values())


@dataclass(frozen=True)
class Lineup:
    """The systems of an evaluation, in the order of the report; the first is the baseline of all speeds.

    Attributes:
        by_batch: batch size -> the systems, with the schedules solved for that batch size.
        clock: a description of the cost model or profile that schedules were solved with.
    """

    by_batch: Mapping[int, list[System]]
    clock: str


def line_up(request: Request, loaded: Loaded, journal: Journal, console: Console) -> Lineup:
    """The systems of an evaluation.

    Decisions and thresholds are added to the journal. Raises ConfigError, before anything is added, for a request that
    can't be met.
    """
    if _PLAN not in journal:
        plan = _plan(request, loaded, console)
        _systems(request, loaded, plan, {}, request.batch_size)  # raises errors before the journal is written
        journal.add(_PLAN, plan.to_dict())
    plan = Plan.from_dict(journal[_PLAN])
    for warning in plan.warnings():
        console.print(f"warning: {warning}", soft_wrap=True)
    thresholds = _thresholds(request, loaded, plan, journal, console)
    return Lineup({size: _systems(request, loaded, plan, thresholds, size) for size in plan.schedules}, plan.clock)


def _plan(request: Request, loaded: Loaded, console: Console) -> Plan:
    checkpoint, config, reference = loaded.checkpoint, loaded.config, loaded.reference
    for option, given in (("--system calm", request.system == "calm"), ("--lossless", request.lossless)):
        if given and (reason := fast_path(checkpoint.model).why_not()) is not None:
            raise ConfigError(f"{option} can't decode with this model: {reason}")
    if None in request.lossless and loaded.order is None and max(config.schedules, default=1.0) <= 1:
        raise ConfigError(
            "--lossless is auto: the checkpoint was trained for no speedup above 1 whose schedule could draft; give "
            "speedups, such as 3 4, or with --order an order of layers from `skipdecode order`"
        )
    weights = common_weights(request.weights, [checkpoint, *([reference] if reference is not None else [])])
    exported = config.exported is not None
    baseline = () if reference is not None or exported else (1.0,)
    speedups = tuple(dict.fromkeys((*baseline, *loaded.speedups)))
    if reference is not None and speedups != (1.0,) and reference.cost != checkpoint.cost and not exported:
        raise ConfigError(
            f"--speedup is {list(speedups)}: targets are relative to the checkpoint's own full depth, but --reference "
            f"{reference.name} has another shape: leave --speedup out"
        )
    decoder = replace(checkpoint, weights=weights)
    sizes = tuple(dict.fromkeys((request.batch_size, *request.time_batch_sizes)))
    profile = profile_of(decoder, config, sizes, loaded.prompt_ids, console, calibrate=request.calibrate)
    schedules: dict[int, dict[float, SpeedPlan]] = {}
    drafts: dict[int, dict[float, SpeedPlan]] = {}
    for size in sizes:
        prompts = prompt_lengths_by_batch(loaded.prompt_ids, size)
        setting: Any = {"prompts": prompts, "profile": profile, "strict": request.strict}
        schedules[size] = {
            speedup: config.plan_for(checkpoint.cost, speedup, over=request.over, **setting) for speedup in speedups
        }
        drafts[size] = {  # decode only: lossless prompts run every layer
            speedup: config.plan_for(checkpoint.cost, speedup, over="decode", **setting)
            for speedup in filter(None, request.lossless)
        }
    return Plan(weights, schedules, drafts, describe_cost_model(profile))


def profile_of(
    checkpoint: Checkpoint,
    config: SkipConfig,
    batch_sizes: Sequence[int],
    prompts: Sequence[Sequence[int]],
    console: Console,
    *,
    calibrate: bool,
) -> Profile | None:
    """The profile to solve schedules with: that saved for this machine, or None for the analytical cost model.

    With `calibrate` a new profile is measured as by `skipdecode calibrate`, but for prompts of these lengths, and not
    saved; a warning is printed where its rounds disagree.
    """
    if not calibrate:
        return fast_path(checkpoint.model).profile(checkpoint.weights)
    fewer = {max(1, size // 4) for size in batch_sizes}  # ended sequences leave the batch
    measured = measure_profile(
        checkpoint.model,
        batch_sizes=sorted({*batch_sizes, *fewer}),
        prompt_lengths=config.timed_lengths(round(statistics.median(map(len, prompts)))),
        weights=checkpoint.weights,
    )
    if (warning := measured.warning()) is not None:
        console.print(f"warning: {warning}", soft_wrap=True)
    return measured.profile


def prompt_lengths_by_batch(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """The prompt lengths of each full batch, for `SkipConfig.plan_for`; of all batches where none is full."""
    batches = [[len(prompts[n]) for n in batch] for batch in batches_of_like_length(prompts, batch_size)]
    return [batch for batch in batches if len(batch) == batch_size] or batches


def common_weights(requested: Weights | None, checkpoints: Sequence[Checkpoint]) -> Weights:
    """The weight format that all these models decode with, so that their times are comparable.

    Raises ConfigError for a format that a model doesn't support, and where only some models have a fast path.
    """
    reasons = [fast_path(checkpoint.model).why_not() for checkpoint in checkpoints]
    reason = next(filter(None, reasons), None)
    if requested not in (None, "model") and reason is not None:
        raise ConfigError(f"--weights {requested}: this model can't decode with them: {reason}")
    if reason is not None and not all(reasons):
        raise ConfigError(
            f"--reference: of {' and '.join(c.name for c in checkpoints)}, one must decode through the forward pass of "
            f"transformers ({reason}) and the other has a fast path, so their times aren't comparable"
        )
    if reason is not None:
        return "model"
    if requested is None:
        usual = {fast_path(checkpoint.model).usual_weights() for checkpoint in checkpoints}
        requested = "packed" if usual == {"packed"} else "model"
    for checkpoint in checkpoints:
        fast_path(checkpoint.model).decoder(
            requested
        )  # raises ConfigError for a format that the device doesn't support
    return requested


def _thresholds(
    request: Request, loaded: Loaded, plan: Plan, journal: Journal, console: Console
) -> dict[float, Threshold]:
    by_target = request.system == "calm" and loaded.config.exported is None
    speedups = [speedup for speedup in loaded.speedups if speedup > 1 and by_target]
    checkpoint = replace(loaded.checkpoint, weights=plan.weights)
    found: dict[float, Threshold] = {}
    with Progress(console=console, disable=not speedups) as progress:
        bar = progress.add_task("thresholds on validation prompts", total=PROBES * len(speedups))
        for number, speedup in enumerate(speedups, start=1):
            schedule = plan.schedules[request.batch_size][speedup].schedule
            found[speedup] = calibrated_threshold(
                checkpoint,
                loaded.validation,
                layers_per_token(schedule, loaded.config),
                max_new_tokens=loaded.max_new_tokens,
                journal=journal,
                advance=lambda: progress.advance(bar),
            )
            progress.update(bar, completed=PROBES * number)
    return found


def _systems(
    request: Request, loaded: Loaded, plan: Plan, thresholds: Mapping[float, Threshold], batch_size: int
) -> list[System]:
    checkpoint, schedules = replace(loaded.checkpoint, weights=plan.weights), plan.schedules[batch_size]
    exported = loaded.config.exported
    targets = [speedup for speedup in loaded.speedups if speedup != 1]
    if loaded.reference is None:
        # An exported checkpoint has a single schedule, which is then the baseline.
        systems: list[System] = [SkipSystem("1x", checkpoint, schedules[exported or 1.0].schedule, 1.0)]
        targets = [] if exported is not None else targets
    else:
        reference = replace(loaded.reference, weights=plan.weights)
        systems = [SkipSystem("1x", reference, SkipSchedule.full_depth(reference.num_layers), 1.0)]
        if 1.0 in schedules:
            systems.append(SkipSystem("full-depth", checkpoint, schedules[1.0].schedule))
    for speedup in targets:
        found = schedules[speedup]
        if request.system == "skip" or exported is not None:
            systems.append(SkipSystem(f"{speedup:g}x", checkpoint, found.schedule, speedup, found.fallback_speedup))
        else:
            threshold = thresholds.get(speedup, Threshold(1.0))
            systems.append(CalmSystem(f"calm-{speedup:g}x", checkpoint, threshold, speedup, found.fallback_speedup))
    for drafts in request.lossless:
        if drafts is None:
            systems.append(LosslessSystem("lossless", checkpoint, None, order=loaded.order))
        else:
            found = plan.drafts[batch_size][drafts]
            systems.append(LosslessSystem(f"lossless-{drafts:g}x", checkpoint, found.schedule, found.fallback_speedup))
    for value in request.calm_thresholds:
        systems.append(CalmSystem(f"calm-{value:g}", checkpoint, Threshold(value)))
    for name, schedule in loaded.schedules:
        if schedule.num_layers != checkpoint.num_layers:
            raise ConfigError(f"--schedule {name}: {depth_mismatch(schedule, checkpoint.num_layers)}")
        systems.append(SkipSystem(name, checkpoint, schedule))
    labels = [system.label for system in systems]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two rows would be named {label!r}: rename a schedule file, or leave one out")
    return systems


def layers_per_token(schedule: SkipSchedule, config: SkipConfig) -> float:
    """Mean layers per token over outputs of the training lengths; over the horizon where these aren't known.

    Most outputs end before the horizon, while a decaying budget is still large: over the horizon the mean is about a
    fifth smaller.
    """
    if "lengths" not in config.solver:
        return schedule.mean_budget(config.horizon or schedule.horizon)
    counts = Lengths.read(config.solver["lengths"]).counts
    tokens = sum(length * count for length, count in counts)
    return sum(schedule.mean_budget(length) * length * count for length, count in counts) / tokens
