"""Calibrated profiles: step timings of a model's sizes on one machine, saved in the user's cache folder."""

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
from skipdecode.files import write_atomically
from skipdecode.kernels.cpu import kernels
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import CostModel, MeasuredCost, interpolated
from skipdecode.schedule.lengths import Steps

_PROFILE_FORMAT = 5
MARGIN = 1.03  # factor on a target, because the time of batches varies by a few percent
_MIN_SECONDS = {"step": 1e-9, "prefill": 1e-9, "start": 0.0}  # smaller values mean that the file is damaged


@dataclass(frozen=True)
class TimedBatch:
    """The timings of one batch size and prompt length.

    Attributes:
        batch_size: number of sequences that decoded together.
        prompt_length: number of positions of their prompts.
        context: number of cached positions halfway through the timed steps.
        step: number of layers -> mean seconds of a decode step.
        prefill: number of layers -> seconds of the prefill.
        start: number of layers -> seconds that decoding takes once beyond its steps.
        stopped_share: as in Cost.
        cold: as in MeasuredCost.
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
    """The timings of one model on one machine.

    Attributes:
        setting: what the timings are valid for, as `profile_setting` describes it.
        num_layers: number of layers of the model.
        batches: the timed batches, in any order.
        date: the date of the measurement, YYYY-MM-DD.
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
        """The cost of a batch, interpolated linearly between the timed batch sizes and positions.

        Args:
            batch_size: number of sequences of the batch.
            prompt_length: number of positions in the KV cache when decoding starts.
            prompt_tokens: mean length of the prompts without padding; None: they have no padding.
            expected_steps: as in Cost.
        """
        timed: dict[int, list[TimedBatch]] = {}
        for batch in self.batches:
            timed.setdefault(batch.batch_size, []).append(batch)
        rows = min(max(batch_size, min(timed)), max(timed))
        depths = list(self.batches[0].step)
        step = {  # batch size -> number of layers -> seconds
            count: {n: clamped({b.context: b.step[n] for b in same}, prompt_length) for n in depths}
            for count, same in timed.items()
        }

        def of_batch(value: Callable[[TimedBatch], float]) -> float:
            """Interpolate a value between prompt lengths, then between batch sizes."""
            by_rows = {
                count: clamped({b.prompt_length: value(b) for b in same}, prompt_length)
                for count, same in timed.items()
            }
            return clamped(by_rows, rows)

        def start(layers: int) -> float:
            return of_batch(lambda batch: batch.start[layers])

        prefill = {b.batch_size * b.prompt_length: b.prefill for b in self.batches}
        tokens = batch_size * (prompt_tokens or prompt_length)
        longer = min((b.context for b in self.batches if b.context > prompt_length), default=None)
        later = None if longer is None else self.at(batch_size=batch_size, prompt_length=longer)
        return MeasuredCost(
            self.num_layers,
            {n: clamped({count: times[n] for count, times in step.items()}, rows) for n in depths},
            rows,
            expected_steps,
            {n: extrapolated({count: times[n] for count, times in prefill.items()}, tokens) for n in depths},
            {n: start(n) for n in depths},
            {count: times for count, times in step.items() if count < rows},
            None if longer is None or later is None else (longer - prompt_length, later),
            min(self.batches, key=lambda b: abs(math.log(b.batch_size * b.prompt_length / tokens))).stopped_share,
            of_batch(lambda batch: batch.cold),
            MARGIN,
        )

    def save(self, path: Path | None = None) -> Path:
        """Write the profile to a file atomically; by default where `find_profile` looks. Returns the file's path.

        Raises ConfigError where the file can't be written.
        """
        try:
            if path is None:
                path = profiles_folder() / profile_name(self.setting)
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"format": _PROFILE_FORMAT, **asdict(self)}, indent=2) + "\n")
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            raise ConfigError(
                f"the profile can't be saved: {error}; set XDG_CACHE_HOME to a writable folder"
            ) from error
        return path

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a profile from a file. Raises ConfigError where it can't be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != _PROFILE_FORMAT:
                raise ConfigError("it has another format")
            batches = tuple(
                TimedBatch(**{**batch, **{name: _by_layers(batch[name], low) for name, low in _MIN_SECONDS.items()}})
                for batch in values.pop("batches")
            )
            profile = cls(**values, batches=batches)
            check_counts(num_layers=profile.num_layers)
            depths = {tuple(sorted(times)) for b in batches for times in (b.step, b.prefill, b.start)}
            if len(depths) != 1 or any((each[0], each[-1]) != (1, profile.num_layers) for each in depths):
                raise ConfigError(f"its timings must be for the same numbers of layers, from 1 to {profile.num_layers}")
            if not isinstance(profile.date, str):
                raise ConfigError(f"its date is {profile.date!r}")
            return profile
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"the profile {path} can't be read ({error}): remove it, and run skipdecode calibrate again"
            ) from error


def clamped(times: Mapping[int, float], at: int) -> float:
    """Interpolate linearly; outside the known range, take the nearest value."""
    return interpolated(times, min(max(at, min(times)), max(times)))


def extrapolated(times: Mapping[int, float], at: int) -> float:
    """Interpolate as `clamped`; above the known range, scale the last value in proportion."""
    last = max(times)
    return times[last] * at / last if at > last else clamped(times, at)


def _by_layers(times: Mapping[str, float], minimum: float) -> dict[int, float]:
    found = {int(layers): float(seconds) for layers, seconds in times.items()}
    if len(found) < 2 or not all(minimum <= seconds < math.inf for seconds in found.values()):
        raise ValueError(f"times are {times}")
    return found


def profile_setting(
    model: Any, sizes: CostModel, weights: Weights, device: torch.device | None = None
) -> dict[str, Any]:
    """Everything that a model's timings depend on, as plain values: its sizes and type, weights, processor, threads.

    `device` is the device that the model decodes on; None: the one that it is on.
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
    """The saved profile of a setting; None where there is none. Raises ConfigError where it is damaged."""
    return read_profile(profile_name(setting))


def read_profile(name: str) -> Profile | None:
    """As `find_profile`, by the setting's `profile_name`, for frequent use."""
    try:
        path = os.path.join(_profiles_folder(), name)
        written = os.stat(path).st_mtime_ns
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return _load_cached(path, written)


@lru_cache(maxsize=32)  # since every call of generate needs the profile
def _load_cached(path: str, written: int) -> Profile:
    return Profile.load(Path(path))


def describe_cost_model(profile: Profile | None) -> str:
    """The name of the cost model that speedups are predicted with, for messages."""
    return "the analytical cost model" if profile is None else f"the calibrated profile of {profile.date}"


def profiles_folder() -> Path:
    """The folder of saved profiles: `skipdecode/profiles` in $XDG_CACHE_HOME, or in ~/.cache."""
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
    """The name of the GPU that a device is, or of the machine's CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
