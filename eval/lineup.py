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
from skipdecode.schedule.machine_profile import Profile, describe_clock
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.timing.calibrate import measure_profile

_PLAN = ("plan",)


@dataclass(frozen=True)
class Plan:
    """Decisions that are made as an evaluation starts and hold when it is resumed: memory and clock may differ by then.

    Attributes:
        weights: what decode steps compute with.
        schedules: by batch size and speedup, with what they are expected to reach.
        drafts: those of lossless decoding, likewise.
        clock: what the schedules were solved for, in words.
    """

    weights: Weights
    schedules: dict[int, dict[float, SpeedPlan]]
    drafts: dict[int, dict[float, SpeedPlan]]
    clock: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a journal."""
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
        """Say of each target that can't be reached what decodes in its place, at the first batch size that has none."""
        missed: dict[float | None, str] = {}
        for by_size in (self.schedules, self.drafts):
            for size, found in by_size.items():
                for one in found.values():
                    if not one.reached:
                        missed.setdefault(one.target, f"at batch {size}, {one.warning()}")
        return list(missed.values())


@dataclass(frozen=True)
class Lineup:
    """The systems of an evaluation, in the order of the report; the first is what the others are measured against.

    Attributes:
        by_batch: batch size -> the systems, under the schedules of batches of that size.
        clock: what the schedules were solved for, in words.
    """

    by_batch: Mapping[int, list[System]]
    clock: str


def line_up(request: Request, loaded: Loaded, journal: Journal, console: Console) -> Lineup:
    """The systems that take part.

    What is decided and found goes into the journal. Raises ConfigError, before anything does, for what can't be met.
    """
    if _PLAN not in journal:
        plan = _plan(request, loaded, console)
        _take_part(request, loaded, plan, {}, request.batch_size)  # for the errors
        journal.add(_PLAN, plan.to_dict())
    plan = Plan.from_dict(journal[_PLAN])
    for warning in plan.warnings():
        console.print(f"warning: {warning}", soft_wrap=True)
    thresholds = _thresholds(request, loaded, plan, journal, console)
    return Lineup({size: _take_part(request, loaded, plan, thresholds, size) for size in plan.schedules}, plan.clock)


def _plan(request: Request, loaded: Loaded, console: Console) -> Plan:
    checkpoint, config, reference = loaded.checkpoint, loaded.config, loaded.reference
    for option, asked in (("--system calm", request.system == "calm"), ("--lossless", request.lossless)):
        if asked and (reason := fast_path(checkpoint.model).why_not()) is not None:
            raise ConfigError(f"{option} can't decode with this model: {reason}")
    if None in request.lossless and loaded.order is None and max(config.schedules, default=1.0) <= 1:
        raise ConfigError(
            "--lossless is auto: the checkpoint names no speed above 1 that it was trained for, whose layers would "
            "draft; name speeds, such as 3 4, or with --order an order of layers, as skipdecode order finds it"
        )
    weights = common_weights(request.weights, [checkpoint, *([reference] if reference is not None else [])])
    exported = config.exported is not None
    baseline = () if reference is not None or exported else (1.0,)
    speedups = tuple(dict.fromkeys((*baseline, *loaded.speedups)))
    if reference is not None and speedups != (1.0,) and reference.cost != checkpoint.cost and not exported:
        raise ConfigError(
            f"--speedup is {list(speedups)}: a target is over the checkpoint's own full depth, and --reference "
            f"{reference.name} is of another shape: leave --speedup out"
        )
    decoder = replace(checkpoint, weights=weights)
    sizes = tuple(dict.fromkeys((request.batch_size, *request.time_batch_sizes)))
    profile = clock_of(decoder, config, sizes, loaded.prompt_ids, console, calibrate=request.calibrate)
    schedules: dict[int, dict[float, SpeedPlan]] = {}
    drafts: dict[int, dict[float, SpeedPlan]] = {}
    for size in sizes:
        prompts = prompts_at_hand(loaded.prompt_ids, size)
        at_hand: Any = {"prompts": prompts, "profile": profile, "strict": request.strict}
        schedules[size] = {
            speedup: config.plan_for(checkpoint.cost, speedup, over=request.over, **at_hand) for speedup in speedups
        }
        drafts[size] = {  # lossless prompts run every layer
            speedup: config.plan_for(checkpoint.cost, speedup, over="decode", **at_hand)
            for speedup in filter(None, request.lossless)
        }
    return Plan(weights, schedules, drafts, describe_clock(profile))


def clock_of(
    checkpoint: Checkpoint,
    config: SkipConfig,
    batch_sizes: Sequence[int],
    prompts: Sequence[Sequence[int]],
    console: Console,
    *,
    calibrate: bool,
) -> Profile | None:
    """The clock that a target's schedule follows from: the profile that is kept for this machine.

    Or one that is measured now, where that is asked for: as by `skipdecode calibrate`, but behind prompts such as
    these, and not kept; the console is told where its rounds disagree. None: bytes and operations.
    """
    if not calibrate:
        return fast_path(checkpoint.model).profile(checkpoint.weights)
    fewer = {max(1, size // 4) for size in batch_sizes}  # rows whose texts have ended leave
    measured = measure_profile(
        checkpoint.model,
        batch_sizes=sorted({*batch_sizes, *fewer}),
        prompt_lengths=config.timed_lengths(round(statistics.median(map(len, prompts)))),
        weights=checkpoint.weights,
    )
    if (warning := measured.warning()) is not None:
        console.print(f"warning: {warning}", soft_wrap=True)
    return measured.profile


def prompts_at_hand(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """The tokens of each prompt of each batch, for `SkipConfig.schedule_for`: of full batches, where there is one."""
    batches = [[len(prompts[n]) for n in batch] for batch in batches_of_like_length(prompts, batch_size)]
    return [batch for batch in batches if len(batch) == batch_size] or batches


def common_weights(asked: Weights | None, checkpoints: Sequence[Checkpoint]) -> Weights:
    """The kind of weights that decode steps of all these models compute with, so that their clocks compare.

    Raises ConfigError for weights that one of them can't decode with, and where one has a fast path and another hasn't.
    """
    reasons = [fast_path(checkpoint.model).why_not() for checkpoint in checkpoints]
    reason = next(filter(None, reasons), None)
    if asked not in (None, "model") and reason is not None:
        raise ConfigError(f"--weights {asked}: this model can't decode with them: {reason}")
    if reason is not None and not all(reasons):
        raise ConfigError(
            f"--reference: of {' and '.join(c.name for c in checkpoints)} one decodes through its own forward pass "
            f"({reason}), the other doesn't have to: their clocks wouldn't compare"
        )
    if reason is not None:
        return "model"
    if asked is None:
        asked = "packed" if all(fast_path(c.model).usual_weights() == "packed" for c in checkpoints) else "model"
    for checkpoint in checkpoints:
        fast_path(checkpoint.model).decoder(asked)  # which refuses what the device can't do
    return asked


def _thresholds(
    request: Request, loaded: Loaded, plan: Plan, journal: Journal, console: Console
) -> dict[float, Threshold]:
    """Of each target, where systems are confidence exits."""
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
                layers_a_token(schedule, loaded.config),
                max_new_tokens=loaded.max_new_tokens,
                journal=journal,
                advance=lambda: progress.advance(bar),
            )
            progress.update(bar, completed=PROBES * number)
    return found


def _take_part(
    request: Request, loaded: Loaded, plan: Plan, thresholds: Mapping[float, Threshold], batch_size: int
) -> list[System]:
    checkpoint, schedules = replace(loaded.checkpoint, weights=plan.weights), plan.schedules[batch_size]
    exported = loaded.config.exported
    targets = [speedup for speedup in loaded.speedups if speedup != 1]
    if loaded.reference is None:
        # An exported checkpoint has one schedule, which is what others are measured against then.
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
            systems.append(SkipSystem(f"{speedup:g}x", checkpoint, found.schedule, speedup, found.shortfall))
        else:
            threshold = thresholds.get(speedup, Threshold(1.0))
            systems.append(CalmSystem(f"calm-{speedup:g}x", checkpoint, threshold, speedup, found.shortfall))
    for drafts in request.lossless:
        if drafts is None:
            systems.append(LosslessSystem("lossless", checkpoint, None, order=loaded.order))
        else:
            found = plan.drafts[batch_size][drafts]
            systems.append(LosslessSystem(f"lossless-{drafts:g}x", checkpoint, found.schedule, found.shortfall))
    for value in request.calm_thresholds:
        systems.append(CalmSystem(f"calm-{value:g}", checkpoint, Threshold(value)))
    for name, schedule in loaded.schedules:
        if schedule.num_layers != checkpoint.num_layers:
            raise ConfigError(f"--schedule {name}: {depth_mismatch(schedule, checkpoint.num_layers)}")
        systems.append(SkipSystem(name, checkpoint, schedule))
    labels = [system.label for system in systems]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two rows would be called {label!r}: rename a schedule's file, or leave one out")
    return systems


def layers_a_token(schedule: SkipSchedule, config: SkipConfig) -> float:
    """The layers of a token on average over texts as long as the training's; over the horizon where these aren't known.

    Texts end early, while a falling budget is still large: over the horizon it is a fifth smaller.
    """
    if "lengths" not in config.solver:
        return schedule.mean_budget(config.horizon or schedule.horizon)
    counts = Lengths.read(config.solver["lengths"]).counts
    tokens = sum(length * texts for length, texts in counts)
    return sum(schedule.mean_budget(length) * length * texts for length, texts in counts) / tokens
