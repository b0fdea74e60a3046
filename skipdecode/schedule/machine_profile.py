"""Profiles: the clock of one machine for models of one shape, measured once and kept where caches belong."""

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import unwrap
from skipdecode.files import write_whole
from skipdecode.kernels.cpu import kernels
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import CostModel, MeasuredCost, interpolated
from skipdecode.schedule.lengths import Steps

_PROFILE_FORMAT = 5
MARGIN = 1.03  # beyond a target, as batches take some percent more or less than others that were timed
_LEAST = {"step": 1e-9, "prefill": 1e-9, "start": 0.0}  # seconds of a file that wasn't damaged


@dataclass(frozen=True)
class TimedBatch:
    """A batch size and prompt length as they were timed.

    Attributes:
        batch_size: rows that decoded together.
        prompt_length: columns of their prompts.
        context: columns in the cache in the middle of the steps that were timed.
        step: layers -> seconds of a decode step, of these on average.
        prefill: layers -> seconds of the prompts' pass.
        start: layers -> seconds that decoding takes once beyond its steps.
        stopped_share: as of a Cost.
        cold: as of a MeasuredCost.
    """

    batch_size: int
    prompt_length: int
    context: int
    step: Mapping[int, float]
    prefill: Mapping[int, float]
    start: Mapping[int, float]
    stopped_share: float = 1.0
    cold: float = 0.0

    def __post_init__(self) -> None:
        check_counts(batch_size=self.batch_size, prompt_length=self.prompt_length, context=self.context)
        if not 0 <= self.stopped_share <= 1:
            raise ValueError(f"stopped_share is {self.stopped_share!r}")
        if not 0 <= self.cold < math.inf:
            raise ValueError(f"cold is {self.cold!r}")


@dataclass(frozen=True)
class Profile:
    """The clock of one machine: of one or more batches.

    Attributes:
        setting: what it holds for, as `setting_of` says it.
        num_layers: of the model.
        batches: that were timed, in any order.
        date: of the measurement.
    """

    setting: Mapping[str, Any]
    num_layers: int
    batches: tuple[TimedBatch, ...]
    date: str

    def __hash__(self) -> int:
        return hash((self.date, self.num_layers, len(self.batches)))

    def at(
        self,
        *,
        batch_size: int = 1,
        prompt_length: int,
        prompt_tokens: int | None = None,
        expected_steps: Steps | None = None,
    ) -> MeasuredCost:
        """The cost of a batch: between those that were timed, time is taken to be straight in rows and columns.

        Args:
            batch_size: its rows.
            prompt_length: columns in the cache when decoding starts.
            prompt_tokens: of a prompt on average, where prompts stand behind padding; None for as many as columns.
            expected_steps: as of a Cost.
        """
        timed: dict[int, list[TimedBatch]] = {}
        for batch in self.batches:
            timed.setdefault(batch.batch_size, []).append(batch)
        rows = min(max(batch_size, min(timed)), max(timed))
        depths = list(self.batches[0].step)
        step = {  # rows -> layers -> seconds
            count: {n: within({b.context: b.step[n] for b in same}, prompt_length) for n in depths}
            for count, same in timed.items()
        }

        def behind_prompts(value: Callable[[TimedBatch], float]) -> float:
            """A value of the batch, between those behind shorter and longer prompts, and of fewer and more rows."""
            by_rows = {
                count: within({b.prompt_length: value(b) for b in same}, prompt_length) for count, same in timed.items()
            }
            return within(by_rows, rows)

        def start(layers: int) -> float:
            return behind_prompts(lambda batch: batch.start[layers])

        prefill = {b.batch_size * b.prompt_length: b.prefill for b in self.batches}
        tokens = batch_size * (prompt_tokens or prompt_length)
        longer = min((b.context for b in self.batches if b.context > prompt_length), default=None)
        later = None if longer is None else self.at(batch_size=batch_size, prompt_length=longer)
        return MeasuredCost(
            self.num_layers,
            {n: within({count: times[n] for count, times in step.items()}, rows) for n in depths},
            rows,
            expected_steps,
            {n: proportional({count: times[n] for count, times in prefill.items()}, tokens) for n in depths},
            {n: start(n) for n in depths},
            {count: times for count, times in step.items() if count < rows},
            None if longer is None or later is None else (longer - prompt_length, later),
            min(self.batches, key=lambda b: abs(math.log(b.batch_size * b.prompt_length / tokens))).stopped_share,
            behind_prompts(lambda batch: batch.cold),
            MARGIN,
        )

    def save(self, path: Path | None = None) -> Path:
        """Write it to a file, or where `find_profile` looks, whole or not at all. Returns the file.

        Raises ConfigError where that can't be written.
        """
        try:
            if path is None:
                path = profiles_folder() / profile_name(self.setting)
                path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"format": _PROFILE_FORMAT, **asdict(self)}, indent=2) + "\n")
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            raise ConfigError(
                f"the profile can't be kept: {error}; name a folder that can be written in XDG_CACHE_HOME"
            ) from error
        return path

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """The profile of a file. Raises ConfigError where it can't be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != _PROFILE_FORMAT:
                raise ConfigError("it has another format")
            batches = tuple(
                TimedBatch(**{**batch, **{name: _by_layers(batch[name], least) for name, least in _LEAST.items()}})
                for batch in values.pop("batches")
            )
            profile = cls(**values, batches=batches)
            check_counts(num_layers=profile.num_layers)
            depths = {tuple(sorted(times)) for b in batches for times in (b.step, b.prefill, b.start)}
            if len(depths) != 1 or any((each[0], each[-1]) != (1, profile.num_layers) for each in depths):
                raise ConfigError(f"its times aren't of the same depths, from 1 to {profile.num_layers}")
            if not isinstance(profile.date, str):
                raise ConfigError(f"its date is {profile.date!r}")
            return profile
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"the profile {path} can't be read ({error}): remove it, and run skipdecode calibrate again"
            ) from error


def within(times: Mapping[int, float], at: int) -> float:
    """The value at a number, as `interpolated`; beyond those that are known that of the nearest."""
    return interpolated(times, min(max(at, min(times)), max(times)))


def proportional(times: Mapping[int, float], at: int) -> float:
    """The value at a number, as `within`; beyond the largest that is known it grows in proportion."""
    most = max(times)
    return times[most] * at / most if at > most else within(times, at)


def _by_layers(times: Mapping[str, float], least: float) -> dict[int, float]:
    found = {int(layers): float(seconds) for layers, seconds in times.items()}
    if len(found) < 2 or not all(least <= seconds < math.inf for seconds in found.values()):
        raise ValueError(f"times are {times}")
    return found


def setting_of(model: Any, sizes: CostModel, weights: Weights, device: torch.device | None = None) -> dict[str, Any]:
    """All that a model's clock depends on, as plain values: its sizes and type, the weights, the machine, threads.

    `device` is the one that it decodes on; None for the one that it is on.
    """
    inner = unwrap(model)
    device = inner.device if device is None else device
    on_cpu = device.type == "cpu"
    compiled = kernels() if on_cpu and weights != "model" else None
    return {
        "model_type": inner.config.model_type,
        **asdict(sizes),
        "dtype": str(inner.dtype).removeprefix("torch."),
        "weights": weights,
        "processor": processor(device),
        "threads": torch.get_num_threads() if on_cpu else None,
        "kernels": compiled.name if compiled is not None else None,
    }


def find_profile(setting: Mapping[str, Any]) -> Profile | None:
    """The profile that was kept for a setting; None where there is none. Raises ConfigError for a damaged one."""
    return read_profile(profile_name(setting))


def read_profile(name: str) -> Profile | None:
    """`find_profile` by `profile_name`, for who asks often."""
    try:
        path = os.path.join(_profiles_folder(), name)
        written = os.stat(path).st_mtime_ns
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return _profile_of(path, written)


@lru_cache(maxsize=32)
def _profile_of(path: str, written: int) -> Profile:
    """The profile of a file that was written at a time: every call of generate asks for it."""
    return Profile.load(Path(path))


def describe_clock(profile: Profile | None) -> str:
    """The clock that speeds are solved for, in words."""
    return "bytes and operations" if profile is None else f"this machine's clock, measured {profile.date}"


def profiles_folder() -> Path:
    """The folder of profiles: `skipdecode/profiles` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(_profiles_folder())


def _profiles_folder() -> str:  # every call of generate asks, and paths of pathlib take their time
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    return os.path.join(cache, "skipdecode", "profiles")


def profile_name(setting: Mapping[str, Any]) -> str:
    """The name of a setting's file in the folder of profiles."""
    described = json.dumps({"format": _PROFILE_FORMAT, **setting}, sort_keys=True)
    return f"{setting['model_type']}-{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"


@cache
def processor(device: torch.device) -> str:
    """The name of the processor that a device is, or belongs to."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
