"""What a checkpoint stores beside its weights: the schedules that it was trained with, and its task."""

import inspect
import json
import math
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import cached_file

from skipdecode.checkpoint.offline import without_network
from skipdecode.errors import ConfigError, check_counts, first_line, renamed, unknown
from skipdecode.files import write_atomically
from skipdecode.internals import FROM_MODEL_CONFIG
from skipdecode.schedule.cost import MACHINES, Cost, CostModel
from skipdecode.schedule.lengths import Lengths, LengthsByPrompt
from skipdecode.schedule.machine_profile import Profile, describe_cost_model
from skipdecode.schedule.plan import SpeedPlan, rounded_down
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.schedule.solver import OutOfReachError, check_speedup, solve_schedule

CONFIG_KEY = "skipdecode"  # the key in config.json
DEFAULT_SPEEDUP = "default_speedup"  # the key in generation_config.json, read by `skipdecode.generate.remote_entry`
ADAPTERS_FILE = "skipdecode.json"  # in a folder of adapters, which has no config.json
_FORMAT, _OLDEST_FORMAT = 3, 2  # format 2 has no sequence lengths
_CONDITIONS = ("prompt_length", "prompt_lengths", "lengths", "batch_size", "machine")
_SOLVER_SETTINGS = inspect.signature(solve_schedule).parameters.keys() - {"model", "speedup", "dtype"}
_COUNTS = ("horizon", "warmup_layers", "prompt_length", "batch_size")
_COMPUTED_IN = ("float32", "bfloat16", "float16")  # data types that weights in 4 bits are computed in
_NEAR = 2  # prompts up to this factor longer or shorter than in training use the training's schedules
_MEASURED_PARTS = 8  # prompt lengths that are distinguished per doubling, where schedules follow a calibrated profile


def _rounded_length(length: float, parts: int) -> int:
    """Round to one of `parts` lengths per doubling, so that few schedules have to be solved."""
    return round(2 ** (round(parts * math.log2(length)) / parts))


@dataclass(frozen=True)
class SkipConfig:
    """The schedules of a checkpoint: it decodes with the schedules that it was trained with.

    It is stored in `config.json` under the key `skipdecode`, so a loaded model has it as `model.config.skipdecode`.

    Attributes:
        schedules: speedup -> the schedule that it was trained with.
        solver: the keyword arguments of `solve_schedule` that gave these schedules; used for other speedups too.
        task: name and options of the task that the checkpoint was trained on; plain values.
        base_model: name on the Hub of the model that training started from; None for a folder or random weights.
        lengths_by_prompt: lengths of the sequences that the checkpoint generates; None where they weren't measured.
        base_weights: how the base of adapters is loaded, such as {"quantize": "nf4", "dtype": "bfloat16"}; None: as it
            is stored.
    """

    schedules: Mapping[float, SkipSchedule] = field(default_factory=dict)
    solver: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    lengths_by_prompt: LengthsByPrompt | None = None
    base_weights: Mapping[str, str] | None = None

    texts = renamed("texts", "lengths_by_prompt")

    @property
    def exported(self) -> float | None:
        """The only speedup of an exported checkpoint, which has no solver settings; None for other checkpoints."""
        return next(iter(self.schedules)) if len(self.schedules) == 1 and not self.solver else None

    @property
    def conditions(self) -> dict[str, Any]:
        """The solver settings that are arguments of `CostModel.at`."""
        return {name: self.solver[name] for name in _CONDITIONS if name in self.solver}

    @property
    def over(self) -> Over:
        """What the trained speedups measure: decoding, or prefill and decoding."""
        over: Over = self.solver.get("over", "decode")
        return over

    def plan_for(
        self,
        cost: CostModel | Cost,
        speedup: float,
        *,
        over: Over | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        profile: Profile | None = None,
        strict: bool = False,
    ) -> SpeedPlan:
        """The schedule for a target speedup and its predicted speedup.

        A trained schedule is used where its conditions are those of the batch, and always where training used a single
        speedup besides full depth; otherwise a schedule is solved with the settings of training. Where no schedule
        reaches the target, it is the fastest trained one. Without a profile, and in an exported checkpoint, a schedule
        that was trained for the target counts as reaching it.

        Args:
            cost: the cost of the model; a CostModel is evaluated under this checkpoint's conditions.
            speedup: the target of wall-clock time, at least 1.
            over: what the target measures; None: the same as in training.
            prompts: for each batch to decode, the length of each prompt in tokens; None: the batches of training.
            profile: a calibrated profile, for which every schedule except full depth is solved anew.
            strict: whether to refuse a target that can't be reached.

        Raises:
            ConfigError: for a target that can't be reached with strict=True, or (OutOfReachError) where there is no
                trained schedule to use instead.
        """
        over = self.over if over is None else over
        schedule, limit = None, 0.0
        try:
            schedule = self._solve(cost, speedup, over, prompts, profile)
        except OutOfReachError as error:
            if not self.schedules:
                raise
            limit = error.limit
        predicted_by = describe_cost_model(profile)
        as_trained = speedup == 1 or profile is None or not self.solver
        if as_trained and schedule is not None and schedule == self.schedules.get(float(speedup)):
            return SpeedPlan(schedule, float(speedup), float(speedup), predicted_by=predicted_by)
        if isinstance(cost, CostModel):
            cost = self.cost_for(cost, prompts=prompts, profile=profile)
        candidates = self.schedules.values() if schedule is None else [schedule]
        predicted = {each: cost.speedup(each, over=over) for each in candidates}
        schedule = max(predicted, key=lambda each: predicted[each])
        found = predicted[schedule]
        missed = max(limit, rounded_down(found)) if found < speedup else None
        plan = SpeedPlan(schedule, float(speedup), found, missed, predicted_by)
        if strict and not plan.reached:
            raise plan.refusal()
        return plan

    def schedule_for(
        self,
        cost: CostModel | Cost,
        speedup: float,
        *,
        over: Over | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        profile: Profile | None = None,
    ) -> SkipSchedule:
        """The old name of `plan_for(...).schedule`, until the next release. Raises OutOfReachError."""
        warnings.warn("SkipConfig.schedule_for is deprecated: use plan_for", DeprecationWarning, stacklevel=2)
        return self._solve(cost, speedup, self.over if over is None else over, prompts, profile)

    def _solve(
        self,
        cost: CostModel | Cost,
        speedup: float,
        over: Over,
        prompts: Sequence[Sequence[int]] | None,
        profile: Profile | None,
    ) -> SkipSchedule:
        """The trained schedule for a speedup where it applies, else a solved one. Raises OutOfReachError."""
        conditions = self.conditions_at_hand(prompts, measured=profile is not None)
        # An exported checkpoint has no solver settings, and one schedule only.
        trained = not self.solver or (over == self.over and conditions == self.conditions and profile is None)
        # A model that was trained with a single schedule decodes badly with others, whatever the batch and the machine.
        trained |= over == self.over and {float(speedup)} == set(self.schedules) - {1.0}
        if float(speedup) in self.schedules and (trained or speedup == 1):
            return self.schedules[float(speedup)]
        if isinstance(cost, CostModel):
            cost = self._cost_under(conditions, cost, profile)
        settings = {name: value for name, value in self.solver.items() if name not in (*_CONDITIONS, "over")}
        return solve_schedule(cost, speedup, over=over, budgets=self.trained_budgets, **settings)

    def cost_for(
        self, sizes: CostModel, *, prompts: Sequence[Sequence[int]] | None = None, profile: Profile | None = None
    ) -> Cost:
        """The cost of a batch under this checkpoint's conditions; arguments as in `plan_for`."""
        return self._cost_under(self.conditions_at_hand(prompts, measured=profile is not None), sizes, profile)

    def _cost_under(self, conditions: Mapping[str, Any], sizes: CostModel, profile: Profile | None) -> Cost:
        if profile is None:
            return sizes.at(**conditions)
        rows, steps = conditions.get("batch_size", 1), conditions.get("expected_steps")
        if steps is None and "lengths" in conditions:
            steps = Lengths.read(conditions["lengths"]).expected_steps(rows)
        positions = conditions.get("prompt_length", self.prompt_length)
        tokens = conditions.get("prompt_tokens")
        return profile.at(batch_size=rows, prompt_length=positions, prompt_tokens=tokens, expected_steps=steps)

    def conditions_at_hand(self, prompts: Sequence[Sequence[int]] | None, *, measured: bool = False) -> dict[str, Any]:
        """`conditions`, updated to the batches `prompts` (as in `plan_for`).

        Without a profile (`measured`) and sequence lengths, the conditions of training apply. Without a profile, prompt
        lengths near those of training count as equal to them.
        """
        conditions = self.conditions
        if prompts is None or not ("lengths" in conditions or self.lengths_by_prompt is not None or measured):
            return conditions
        rows = max(map(len, prompts))
        if rows != conditions.get("batch_size", 1):
            conditions["batch_size"] = rows
        usual, positions = self.prompt_length, statistics.mean(map(max, prompts))
        if measured or not usual / _NEAR <= positions <= usual * _NEAR:
            conditions["prompt_length"] = _rounded_length(positions, _MEASURED_PARTS if measured else 1)
        if measured:  # the prefill leaves out the padding of shorter prompts
            tokens = statistics.mean(length for batch in prompts for length in batch)
            conditions["prompt_tokens"] = _rounded_length(tokens, _MEASURED_PARTS)
        steps = () if self.lengths_by_prompt is None else self.lengths_by_prompt.expected_steps(prompts)
        if steps:  # there are none where all sequences have a single token, which no schedule makes faster
            conditions["expected_steps"] = steps
        return conditions

    @cached_property
    def prompt_length(self) -> int:
        """The prompt length in tokens that schedules are solved for."""
        usual = Lengths.read(self.solver["prompt_lengths"]).mean if "prompt_lengths" in self.solver else 64
        return int(self.solver.get("prompt_length", round(usual)))

    @property
    def horizon(self) -> int | None:
        """The horizon in the solver settings; that of a solved schedule may be longer, to use up its target."""
        return self.solver.get("horizon")

    def timed_lengths(self, prompt_length: int | None = None) -> list[int]:
        """The prompt lengths to measure a profile at: half of `prompt_length` (None: that of training), all of it, and
        the length of the KV cache when a usual sequence ends.
        """
        usual = self.prompt_length if prompt_length is None else prompt_length
        return sorted({max(1, usual // 2), usual, usual + (self.horizon or 0)})

    @cached_property
    def trained_budgets(self) -> frozenset[int] | None:
        """The numbers of layers that tokens or prompts ran in training; None where no trained schedule skips layers.

        A pretrained model writes poor text with any other number (docs/limitations.md). A model that was trained at
        full depth alone may have exits after any layer, or layer dropout.
        """
        trained = self.schedules.values()
        if not any(schedule.skips for schedule in trained):
            return None
        tokens = {schedule.budget(i) for schedule in trained for i in range(schedule.horizon + 1)}
        return frozenset(tokens | {schedule.prompt_budget for schedule in trained})

    @property
    def trained_range(self) -> tuple[float, float] | None:
        """The lowest and the highest trained speedup; None where there is none."""
        return (min(self.schedules), max(self.schedules)) if self.schedules else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in the file. The keys of schedules have all digits of their speedups."""
        return {
            "format": _FORMAT,
            "schedules": {
                repr(float(s)).removesuffix(".0"): schedule.to_dict() for s, schedule in self.schedules.items()
            },
            "solver": dict(self.solver),
            "task": dict(self.task),
            "base_model": self.base_model,
            **({} if self.lengths_by_prompt is None else {"texts": self.lengths_by_prompt.to_list()}),
            **({} if self.base_weights is None else {"base_weights": dict(self.base_weights)}),
        }

    @classmethod
    def from_dict(cls, values: Any, where: str = CONFIG_KEY) -> "SkipConfig":
        """Read what `to_dict` gave. Raises ConfigError, which names the file or key `where`, for invalid values."""
        try:
            if values["format"] not in range(_OLDEST_FORMAT, _FORMAT + 1):
                allowed = f"this version reads {_OLDEST_FORMAT} to {_FORMAT}"
                raise ConfigError(f"its format is {values['format']}: {allowed}")
            schedules = {float(s): SkipSchedule.from_dict(v) for s, v in values["schedules"].items()}
            for speedup in schedules:
                check_speedup(speedup)
            solver, task = values["solver"], values["task"]
            for name, section in (("solver", solver), ("task", task)):
                if not isinstance(section, Mapping):
                    raise ConfigError(f"{name} is {str(section)[:60]!r}: expected a mapping of names to values")
            for name in solver:
                if name not in _SOLVER_SETTINGS:
                    raise unknown("solver setting", str(name), _SOLVER_SETTINGS)
            check_counts(**{name: solver[name] for name in _COUNTS if name in solver})
            for name in ("lengths", "prompt_lengths"):
                if name in solver:
                    Lengths.read(solver[name])
            if solver.get("machine", "gpu") not in MACHINES:
                raise unknown("machine", str(solver["machine"]), MACHINES)
            lengths_by_prompt = LengthsByPrompt.read(values["texts"]) if "texts" in values else None
            base_weights = values.get("base_weights")
            if base_weights not in (None, *({"quantize": "nf4", "dtype": dtype} for dtype in _COMPUTED_IN)):
                raise ConfigError(f"base_weights is {base_weights!r}: expected quantize nf4 and dtype {_COMPUTED_IN}")
            return cls(schedules, solver, task, values.get("base_model"), lengths_by_prompt, base_weights)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{where} is damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def of(cls, config: PretrainedConfig) -> "SkipConfig | None":
        """The SkipConfig in a model's config; None where there is none. Raises ConfigError where it is invalid."""
        values = getattr(config, CONFIG_KEY, None)
        return None if values is None else cls.from_dict(values, f"{CONFIG_KEY} in the model's config")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it atomically into `config.json`, or for adapters, which have none, into `skipdecode.json`."""
        path = Path(folder) / "config.json"
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8")) | {CONFIG_KEY: self.to_dict()}
        else:
            path, values = Path(folder) / ADAPTERS_FILE, self.to_dict()
        write_atomically(path, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> "SkipConfig | None":
        """Read the SkipConfig of a folder or a repository of the Hub; None where it has none.

        Raises ConfigError where it is invalid, and for a name that is neither a folder nor a readable repository.
        """
        folder = Path(name)
        for path in (folder / ADAPTERS_FILE, folder / "config.json"):
            if path.exists():
                try:
                    values = json.loads(path.read_text(encoding="utf-8"))
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path} is damaged ({error})") from error
                if path.name == ADAPTERS_FILE:
                    return cls.from_dict(values, str(path))
                return cls.from_dict(values[CONFIG_KEY], f"{CONFIG_KEY} in {path}") if CONFIG_KEY in values else None
        if folder.is_dir():
            return None
        where = without_network(str(name))
        try:
            # This reads the file only, and runs no code of the repository.
            values, _ = PretrainedConfig.get_config_dict(str(name), **where)
        except (OSError, ValueError) as error:
            try:
                return cls.load(Path(str(cached_file(str(name), ADAPTERS_FILE, **where))).parent)
            except OSError:
                raise ConfigError(f"{str(name)!r} isn't a checkpoint: {first_line(error)}") from error
        return cls.from_dict(values[CONFIG_KEY], f"{CONFIG_KEY} of {name}") if CONFIG_KEY in values else None


def save_default_speedup(folder: str | os.PathLike[str], speedup: float | None) -> None:
    """Write the speedup that a checkpoint decodes with by default into its `generation_config.json`; None removes it.

    `skipdecode.generate.remote_entry` reads it.
    """
    path = Path(folder) / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop(FROM_MODEL_CONFIG, None)
    values.pop(DEFAULT_SPEEDUP, None)
    if speedup is not None:
        values[DEFAULT_SPEEDUP] = speedup
    write_atomically(path, json.dumps(values, indent=2) + "\n")
