"""The memory of a checkpoint beside its weights: the schedules that it was trained under, and for which task."""

import inspect
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import cached_file

from skipdecode.checkpoint.offline import without_network
from skipdecode.errors import ConfigError, check_counts, first_line, unknown
from skipdecode.files import write_whole
from skipdecode.internals import FROM_MODEL_CONFIG
from skipdecode.schedule.cost import MACHINES, Cost, CostModel
from skipdecode.schedule.lengths import Lengths, LengthsByPrompt
from skipdecode.schedule.machine_profile import Profile, describe_clock
from skipdecode.schedule.plan import SpeedPlan, rounded_down
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.schedule.solver import OutOfReachError, check_speedup, solve_schedule

CONFIG_KEY = "skipdecode"  # of config.json
DEFAULT_SPEEDUP = (
    "default_speedup"  # of generation_config.json: for whoever asks for no speed (`skipdecode.generate.remote_entry`)
)
ADAPTERS_FILE = "skipdecode.json"  # in a folder of adapters, which has no config.json
_FORMAT, _OLDEST_FORMAT = 3, 2  # 2 knew no lengths
_CONDITIONS = ("prompt_length", "prompt_lengths", "lengths", "batch_size", "machine")
_SOLVER = inspect.signature(solve_schedule).parameters.keys() - {"model", "speedup", "dtype"}
_COUNTS = ("horizon", "warmup_layers", "prompt_length", "batch_size")
_NEAR = 2  # times: prompts of such lengths are those that were trained on
_MEASURED_PARTS = 8  # of a doubling: lengths of prompts that a measured clock tells apart


def _one_of_few(length: float, parts: int) -> int:
    """The nearest of so many lengths in each doubling: each is solved for once."""
    return round(2 ** (round(parts * math.log2(length)) / parts))


def _key(speedup: float) -> str:
    """All digits of a speedup, so that whoever asks for it finds it."""
    return repr(float(speedup)).removesuffix(".0")


@dataclass(frozen=True)
class SkipConfig:
    """The schedules of a checkpoint (law 4): what trained it is what decodes with it.

    It stands in `config.json` under the key `skipdecode`, so that it is there wherever the model is, as
    `model.config.skipdecode`.

    Attributes:
        schedules: speedup -> the schedule that training drew for it.
        solver: the keyword arguments of `solve_schedule` that made them; any other speedup is solved with the same.
        task: name and options of the task that the checkpoint was trained on; plain values.
        base_model: name on the Hub of the model that training started from; None for a folder, and for random weights.
        texts: how long its own texts are; None where that wasn't looked at.
    """

    schedules: Mapping[float, SkipSchedule] = field(default_factory=dict)
    solver: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    texts: LengthsByPrompt | None = None

    @property
    def exported(self) -> float | None:
        """The one speed of an exported checkpoint, which has no settings to solve others by; None of any other."""
        return next(iter(self.schedules)) if len(self.schedules) == 1 and not self.solver else None

    @property
    def conditions(self) -> dict[str, Any]:
        """The arguments of the solver that `CostModel.at` takes."""
        return {name: self.solver[name] for name in _CONDITIONS if name in self.solver}

    @property
    def over(self) -> Over:
        """The kind of speed that training drew: of decoding, or of prompt and decoding together."""
        over: Over = self.solver.get("over", "decode")
        return over

    def schedule_for(
        self,
        cost: CostModel | Cost,
        speedup: float,
        *,
        over: Over | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        profile: Profile | None = None,
    ) -> SkipSchedule:
        """The schedule of a speedup: the one trained under where there is one, else one solved the same way.

        Where a single speed was trained, beside full depth, its schedule stays whatever the batch and the clock.

        Args:
            cost: of the model; a CostModel is taken under this checkpoint's conditions.
            speedup: on the wall clock, at least 1.
            over: the kind of speed; None for the one that training drew.
            prompts: the batches at hand, for which a CostModel's schedule is solved where the checkpoint knows how long
                its texts are: of each batch, the tokens of every prompt. None for those of the training.
            profile: this machine's clock, for which every schedule but full depth is solved anew.

        Raises:
            OutOfReachError: for a speedup that no schedule reaches; `plan_for` has the next best one.
        """
        conditions = self.conditions_at_hand(prompts, measured=profile is not None)
        over = self.over if over is None else over
        # Without settings it is an exported checkpoint, whose schedule is the only one that it has.
        trained = not self.solver or (over == self.over and conditions == self.conditions and profile is None)
        # Who learnt one schedule alone knows none that a batch or a clock would have in its place.
        trained |= over == self.over and {float(speedup)} == set(self.schedules) - {1.0}
        if float(speedup) in self.schedules and (trained or speedup == 1):
            return self.schedules[float(speedup)]
        if isinstance(cost, CostModel):
            cost = self._cost_under(conditions, cost, profile)
        settings = {name: value for name, value in self.solver.items() if name not in (*_CONDITIONS, "over")}
        return solve_schedule(cost, speedup, over=over, **settings)

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
        """What a target is decoded with: `schedule_for`, or where that is out of reach the fastest trained schedule.

        So is the schedule of a checkpoint that learnt one alone, where the profile says that it misses its target. By
        bytes, and in an exported checkpoint, a schedule that was trained for the target is taken to reach it.

        Args:
            cost: as of `schedule_for`.
            speedup: as of `schedule_for`.
            over: as of `schedule_for`.
            prompts: as of `schedule_for`.
            profile: as of `schedule_for`.
            strict: whether a target that can't be reached is refused.

        Raises:
            ConfigError: for a target that can't be reached if it is strict, or where nothing was trained in its place.
        """
        over = self.over if over is None else over
        at_hand: dict[str, Any] = {"prompts": prompts, "profile": profile}
        schedule: SkipSchedule | None = None
        limit = 0.0
        try:
            schedule = self.schedule_for(cost, speedup, over=over, **at_hand)
        except OutOfReachError as error:
            if not self.schedules:
                raise
            limit = error.most
        clock = describe_clock(profile)
        as_trained = speedup == 1 or profile is None or not self.solver
        if as_trained and schedule is not None and schedule == self.schedules.get(float(speedup)):
            return SpeedPlan(schedule, float(speedup), float(speedup), clock=clock)
        if isinstance(cost, CostModel):
            cost = self.cost_for(cost, **at_hand)
        candidates = self.schedules.values() if schedule is None else [schedule]
        expected = {each: cost.speedup(each, over=over) for each in candidates}
        schedule = max(expected, key=lambda each: expected[each])
        found = expected[schedule]
        missed = max(limit, rounded_down(found)) if found < speedup else None
        plan = SpeedPlan(schedule, float(speedup), found, missed, clock)
        if strict and not plan.reached:
            raise plan.refusal()
        return plan

    def cost_for(
        self, sizes: CostModel, *, prompts: Sequence[Sequence[int]] | None = None, profile: Profile | None = None
    ) -> Cost:
        """The cost of a batch of such texts; the arguments are those of `schedule_for`."""
        return self._cost_under(self.conditions_at_hand(prompts, measured=profile is not None), sizes, profile)

    def _cost_under(self, conditions: Mapping[str, Any], sizes: CostModel, profile: Profile | None) -> Cost:
        if profile is None:
            return sizes.at(**conditions)
        rows, steps = conditions.get("batch_size", 1), conditions.get("expected_steps")
        if steps is None and "lengths" in conditions:
            steps = Lengths.read(conditions["lengths"]).expected_steps(rows)
        columns = conditions.get("prompt_length", self.prompt_length)
        tokens = conditions.get("prompt_tokens")
        return profile.at(batch_size=rows, prompt_length=columns, prompt_tokens=tokens, expected_steps=steps)

    def conditions_at_hand(self, prompts: Sequence[Sequence[int]] | None, *, measured: bool = False) -> dict[str, Any]:
        """`conditions` with those of batches in their place; prompts count where they are far from the training's.

        Without the lengths of texts, they stay as they were trained with, unless the clock is `measured`: then prompts
        count always.
        """
        conditions = self.conditions
        if prompts is None or not ("lengths" in conditions or self.texts is not None or measured):
            return conditions
        rows = max(map(len, prompts))
        if rows != conditions.get("batch_size", 1):
            conditions["batch_size"] = rows
        usual, columns = self.prompt_length, statistics.mean(map(max, prompts))
        if measured or not usual / _NEAR <= columns <= usual * _NEAR:
            conditions["prompt_length"] = _one_of_few(columns, _MEASURED_PARTS if measured else 1)
        if measured:  # shorter prompts stand behind padding, which their pass leaves out
            tokens = statistics.mean(length for batch in prompts for length in batch)
            conditions["prompt_tokens"] = _one_of_few(tokens, _MEASURED_PARTS)
        steps = () if self.texts is None else self.texts.expected_steps(prompts)
        if steps:  # else there are texts of one token alone, which no schedule makes faster
            conditions["expected_steps"] = steps
        return conditions

    @cached_property
    def prompt_length(self) -> int:
        """Tokens of a prompt that schedules are solved for."""
        usual = Lengths.read(self.solver["prompt_lengths"]).mean if "prompt_lengths" in self.solver else 64
        return int(self.solver.get("prompt_length", round(usual)))

    @property
    def horizon(self) -> int | None:
        """Tokens over which budgets were asked to fall; those of a solved schedule may be more, to meet its target."""
        return self.solver.get("horizon")

    def timed_lengths(self, prompt_length: int | None = None) -> list[int]:
        """The prompts' lengths that a profile of this machine is best measured behind: half as long as usual, as long,
        and as what decoding has when a text of usual length ends. Of the prompts at hand where their length is given.
        """
        usual = self.prompt_length if prompt_length is None else prompt_length
        return sorted({max(1, usual // 2), usual, usual + (self.horizon or 0)})

    @property
    def trained_range(self) -> tuple[float, float] | None:
        """The slowest and the fastest speedup that training drew; None where it drew none."""
        return (min(self.schedules), max(self.schedules)) if self.schedules else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in the file."""
        return {
            "format": _FORMAT,
            "schedules": {_key(speedup): schedule.to_dict() for speedup, schedule in self.schedules.items()},
            "solver": dict(self.solver),
            "task": dict(self.task),
            "base_model": self.base_model,
            **({} if self.texts is None else {"texts": self.texts.to_list()}),
        }

    @classmethod
    def from_dict(cls, values: Any, where: str = CONFIG_KEY) -> "SkipConfig":
        """The SkipConfig that `to_dict` described. Raises ConfigError, which names `where` it stands, for others."""
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
                    raise ConfigError(f"{name} is {str(section)[:60]!r}: expected names and values")
            for name in solver:
                if name not in _SOLVER:
                    raise unknown("solver setting", str(name), _SOLVER)
            check_counts(**{name: solver[name] for name in _COUNTS if name in solver})
            for name in ("lengths", "prompt_lengths"):
                if name in solver:
                    Lengths.read(solver[name])
            if solver.get("machine", "gpu") not in MACHINES:
                raise unknown("machine", str(solver["machine"]), MACHINES)
            texts = LengthsByPrompt.read(values["texts"]) if "texts" in values else None
            return cls(schedules, solver, task, values.get("base_model"), texts)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{where} is damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def of(cls, config: PretrainedConfig) -> "SkipConfig | None":
        """The SkipConfig in a model's config; None where there is none. Raises ConfigError if damaged."""
        values = getattr(config, CONFIG_KEY, None)
        return None if values is None else cls.from_dict(values, f"{CONFIG_KEY} in the model's config")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it into a checkpoint folder's `config.json`, whole or not at all.

        A folder of adapters has no `config.json`: there it is the file `skipdecode.json`.
        """
        path = Path(folder) / "config.json"
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8")) | {CONFIG_KEY: self.to_dict()}
        else:
            path, values = Path(folder) / ADAPTERS_FILE, self.to_dict()
        write_whole(path, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> "SkipConfig | None":
        """The SkipConfig that `save` wrote into a folder, or into a repository of the Hub; None where there is none.

        Raises ConfigError if it is damaged, and where a name is neither a folder nor a repository that can be read.
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
            # The file alone: no code of the repository's.
            values, _ = PretrainedConfig.get_config_dict(str(name), **where)
        except (OSError, ValueError) as error:
            try:
                return cls.load(Path(str(cached_file(str(name), ADAPTERS_FILE, **where))).parent)
            except OSError:
                raise ConfigError(f"{str(name)!r} is no checkpoint: {first_line(error)}") from error
        return cls.from_dict(values[CONFIG_KEY], f"{CONFIG_KEY} of {name}") if CONFIG_KEY in values else None


def save_default_speedup(folder: str | os.PathLike[str], speedup: float | None) -> None:
    """Write the speed that a checkpoint decodes at where nobody asks for one into its `generation_config.json`.

    None takes it out. `skipdecode.generate.remote_entry` reads it.
    """
    path = Path(folder) / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop(FROM_MODEL_CONFIG, None)
    values.pop(DEFAULT_SPEEDUP, None)
    if speedup is not None:
        values[DEFAULT_SPEEDUP] = speedup
    write_whole(path, json.dumps(values, indent=2) + "\n")
