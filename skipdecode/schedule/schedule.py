"""Skip schedules: which layers each generated token runs, as a pure function of its position.

A schedule consists of integers only, and this module imports neither torch nor transformers, so the same object is used
in training and decoding, is saved in the checkpoint, and is named in benchmarks.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from skipdecode.errors import ConfigError, check_counts, renamed, unknown
from skipdecode.schedule.strict_json import parse_json

# Far beyond any real model or sequence: a larger value is a typing error that would cost minutes and gigabytes.
MAX_LAYERS, MAX_HORIZON, MAX_DECAY_RATE = 1_000, 1_000_000, 1_000_000

Decay = Literal["linear", "constant", "power", "exponential", "cosine", "step"]
Placement = Literal["top", "bottom", "even", "ends", "order"]
PromptPolicy = Literal["full", "max"]  # or a number of layers
Over = Literal["decode", "all"]  # what a speedup measures: the time of decoding, or end-to-end (prefill + decode)
Sampling = Literal["one", "sandwich", "all"]  # how many schedules a training step runs (skipdecode.training.sampling)

# The default `decay_rate` of each decay that takes one.
DEFAULT_RATES: dict[str, float] = {
    "power": 2.0,  # the exponent: below 1 the budget falls early, above 1 late
    "exponential": 4.0,  # the budget's excess over min_layers shrinks by exp(rate) within the horizon
    "step": 4.0,  # the number of plateaus
}


def _step_progress(t: float, plateaus: float) -> float:
    return min(math.floor(t * plateaus), plateaus - 1) / (plateaus - 1)


# Progress of the budget from max_layers (0) to min_layers (1) at the fraction t of the horizon, 0 <= t < 1. Linear
# decay isn't listed: `_budgets` computes it in the paper's order of operations, so that both round alike.
_PROGRESS: dict[str, Callable[[float, float], float]] = {
    "constant": lambda t, rate: 0.0,
    "power": lambda t, rate: t**rate,
    "exponential": lambda t, rate: math.expm1(-rate * t) / math.expm1(-rate),
    "cosine": lambda t, rate: (1 - math.cos(math.pi * t)) / 2,
    "step": _step_progress,
}


def check_order(order: Iterable[int], num_layers: int, warmup_layers: int = 1) -> tuple[int, ...]:
    """Check an order of layers, the most important layer first, and return it as plain integers.

    Raises ConfigError unless it contains every index from 0 to `num_layers` - 1 once, the `warmup_layers` lowest ones
    first: transformers takes lengths and masks from the cache of layer 0, which must therefore always run.

    >>> check_order([0, 3, 1, 2], 4)
    (0, 3, 1, 2)
    """
    try:
        layers = tuple(order)
    except TypeError as error:
        raise ConfigError(f"order is {order!r}: it must be a list of layer indices") from error
    if isinstance(order, str) or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in layers):
        raise ConfigError(f"order is {str(order)[:80]!r}: it must be a list of layer indices")
    layers = tuple(map(int, layers))
    if len(layers) != num_layers:
        raise ConfigError(f"order has {len(layers)} layers: it must have each of the model's {num_layers} once")
    if missing := sorted(set(range(num_layers)) - set(layers)):
        raise ConfigError(f"order lacks layer {missing[0]}: it must have each of 0 to {num_layers - 1} once")
    if set(layers[:warmup_layers]) != set(range(warmup_layers)):
        lowest = "layer 0" if warmup_layers == 1 else f"layers 0 to {warmup_layers - 1}"
        raise ConfigError(
            f"order starts with {', '.join(map(str, layers[:warmup_layers]))}: it must start with {lowest}, as "
            f"warmup_layers is {warmup_layers}"
        )
    return layers


@dataclass(frozen=True)
class SkipSchedule:
    """The layers that each generated token runs (SkipDecode, arXiv 2307.02628, section 3).

    Step i takes generated token i (0-based) as its input and runs `budget(i)` layers: `max_layers` at i = 0, decreasing
    along `decay` to `min_layers` at i = horizon - 1, and `min_layers` from there on. The first `warmup_layers` layers
    always run; `placement` chooses the others.

    The layers of a token are always a subset of those of the token before, so no key or value is ever missing. Any
    order of the layers satisfies this: a budget of k runs the first k layers of the order.

    Args:
        num_layers: number of layers of the model (L).
        max_layers: budget of the first step, in layers.
        min_layers: budget from the end of the horizon on, in layers.
        warmup_layers: number of lowest layers that every token runs (w; 1 in the paper).
        horizon: number of generated tokens over which the budget decreases (H), about the median length of a
            completion. With H = 1 the budget is `min_layers` throughout.
        decay: "linear" (the paper's); "constant" (max_layers up to the horizon's end); "power", "exponential",
            "cosine", "step" (plateaus of equal length).
        placement: "top": the first w and the last k - w layers (the paper's); "bottom": the first k (early
            termination); "even": spread over the depth (Unified Layer Skipping, arXiv 2404.06954); "ends": half of the
            budget at either end (D3, arXiv 2503.08524); "order": the first k of `order`.
        prompt: "full": the prompt runs every layer (the paper's); "max": it runs the layers of a budget of max_layers;
            a number from max_layers to num_layers: it runs the layers of that budget.
        decay_rate: the exponent of "power" (default 2), the rate of "exponential" (default 4), or the number of
            plateaus of "step" (default 4). The other decays take none.
        prompt_stop: None: the prompt's tokens run all of the prompt's layers. A number n: they run the lowest n of
            these layers, and the layers above compute their keys and values from that hidden state (SwiftKV, arXiv
            2410.03960, section 3.1). The prompt's last token, which predicts the first new one, still runs them all.
        order: for placement "order" only: every layer's index once, the most important first. It starts with the
            warm-up layers, 0 to warmup_layers - 1.

    Raises:
        ConfigError: unless 1 <= warmup_layers <= min_layers <= max_layers <= num_layers, and every field is valid.

    Examples:
        >>> schedule = SkipSchedule(num_layers=6, max_layers=5, min_layers=2, horizon=4)
        >>> [schedule.budget(i) for i in range(6)]
        [5, 4, 3, 2, 2, 2]
        >>> [schedule.layers_at(i) for i in (0, 1, 5)]
        [(0, 2, 3, 4, 5), (0, 3, 4, 5), (0, 5)]
        >>> schedule.cutoffs(6)
        (6, 0, 1, 2, 3, 6)
        >>> schedule.mean_budget(6)
        3.0
        >>> ordered = SkipSchedule(num_layers=4, max_layers=3, min_layers=2, placement="order", order=(0, 3, 1, 2))
        >>> [ordered.layers_for(budget) for budget in (3, 2)]
        [(0, 1, 3), (0, 3)]
        >>> SkipSchedule(num_layers=12, max_layers=4, min_layers=8)
        Traceback (most recent call last):
            ...
        skipdecode.errors.ConfigError: min_layers is 8: it must lie between warmup_layers (1) and max_layers (4)
    """

    num_layers: int
    max_layers: int
    min_layers: int
    warmup_layers: int = 1
    horizon: int = 64
    decay: Decay = "linear"
    placement: Placement = "top"
    prompt: PromptPolicy | int = "full"
    decay_rate: float | None = None
    prompt_stop: int | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "max_layers", "min_layers", "warmup_layers", "horizon"):
            check_counts(**{name: getattr(self, name)})
            value = int(getattr(self, name))
            object.__setattr__(self, name, value)  # json can't write numpy's integers
            limit = MAX_HORIZON if name == "horizon" else MAX_LAYERS
            if value > limit:
                raise ConfigError(f"{name} is {value}: it must be at most {limit}")
        if self.max_layers > self.num_layers:
            raise ConfigError(
                f"max_layers is {self.max_layers}: it must lie between min_layers ({self.min_layers}) "
                f"and num_layers ({self.num_layers})"
            )
        if self.min_layers > self.max_layers:
            raise ConfigError(
                f"min_layers is {self.min_layers}: it must lie between warmup_layers ({self.warmup_layers}) "
                f"and max_layers ({self.max_layers})"
            )
        if self.warmup_layers > self.min_layers:
            raise ConfigError(
                f"warmup_layers is {self.warmup_layers}: it must lie between 1 and min_layers ({self.min_layers})"
            )
        for name, allowed in (("decay", Decay), ("placement", Placement)):
            if getattr(self, name) not in get_args(allowed):
                raise unknown(name, str(getattr(self, name)), get_args(allowed))
        self._check_order()
        self._check_prompt()
        self._check_prompt_stop()
        self._check_decay_rate()
        # Every valid combination is nested; this refuses a decay or placement added later that isn't.
        budgets = dict.fromkeys((self.prompt_budget, *self._budgets, self.min_layers))  # distinct, in order of use
        sets = [set(self.layers_for(budget)) for budget in budgets]
        if sorted(budgets, reverse=True) != list(budgets) or any(not b <= a for a, b in pairwise(sets)):
            raise ConfigError(
                f"decay {self.decay!r} with placement {self.placement!r} is not nested: a token would run a layer that "
                f"an earlier token skipped: {self}"
            )

    def _check_order(self) -> None:
        order = self.order
        if order is None:
            if self.placement == "order":
                raise ConfigError("placement is 'order': it needs the field order, with every layer's index once")
            return
        if self.placement != "order":
            raise ConfigError(f"order is given with placement {self.placement!r}: only placement 'order' takes one")
        object.__setattr__(self, "order", check_order(order, self.num_layers, self.warmup_layers))

    def _check_prompt(self) -> None:
        prompt = self.prompt
        if isinstance(prompt, str):
            if prompt not in get_args(PromptPolicy):
                raise unknown("prompt", prompt, get_args(PromptPolicy))
            return
        if isinstance(prompt, bool) or not isinstance(prompt, Integral):
            raise ConfigError(f"prompt is {prompt!r}: it must be 'full', 'max', or a number of layers")
        if not self.max_layers <= prompt <= self.num_layers:
            raise ConfigError(
                f"prompt is {prompt}: it must lie between max_layers ({self.max_layers}), since generated tokens read "
                f"the prompt's keys and values in these layers, and num_layers ({self.num_layers})"
            )
        object.__setattr__(self, "prompt", int(prompt))

    def _check_prompt_stop(self) -> None:
        stop = self.prompt_stop
        if stop is None:
            return
        check_counts(prompt_stop=stop)
        if not self.warmup_layers <= stop <= self.num_layers:
            raise ConfigError(
                f"prompt_stop is {stop}: it must lie between warmup_layers ({self.warmup_layers}) and num_layers "
                f"({self.num_layers})"
            )
        object.__setattr__(self, "prompt_stop", int(stop))

    def _check_decay_rate(self) -> None:
        rate = self.decay_rate
        if rate is None:
            return
        if self.decay not in DEFAULT_RATES:
            raise ConfigError(f"decay_rate is {rate!r}: decay {self.decay!r} takes no rate; leave it out")
        if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < rate <= MAX_DECAY_RATE:
            raise ConfigError(f"decay_rate is {rate!r}: it must be a number above 0, and at most {MAX_DECAY_RATE}")
        object.__setattr__(self, "decay_rate", float(rate))
        if self.decay == "step" and (rate < 2 or rate != int(rate)):
            raise ConfigError(f"decay_rate is {rate!r}: decay 'step' takes a whole number of plateaus, 2 or more")
        if self.decay == "exponential" and rate > 100:
            raise ConfigError(f"decay_rate is {rate!r}: decay 'exponential' takes at most 100")

    @classmethod
    def full_depth(cls, num_layers: int, horizon: int = 64) -> "SkipSchedule":
        """The schedule that skips nothing."""
        return cls(num_layers=num_layers, max_layers=num_layers, min_layers=num_layers, horizon=horizon)

    @cached_property
    def _budgets(self) -> tuple[int, ...]:
        """Budgets of the steps before the end of the horizon."""
        last = self.horizon - 1
        spread = self.max_layers - self.min_layers
        if self.decay == "linear":
            return tuple(round(self.max_layers - spread * i / last) for i in range(last))
        rate = self.decay_rate if self.decay_rate is not None else DEFAULT_RATES.get(self.decay, 0.0)
        progress = _PROGRESS[self.decay]
        return tuple(round(self.max_layers - spread * progress(i / last, rate)) for i in range(last))

    def budget(self, i: int) -> int:
        """The number of layers that generated token `i` (0-based) runs."""
        if i < 0:
            raise ValueError(f"step is {i}: steps count from 0")
        return self._budgets[i] if i < len(self._budgets) else self.min_layers

    def layers_at(self, i: int) -> tuple[int, ...]:
        """Indices of the layers that generated token `i` (0-based) runs, ascending."""
        return self.layers_for(self.budget(i))

    @property
    def prompt_budget(self) -> int:
        """The number of layers that hold the prompt's keys and values; the prompt's last token runs them all."""
        if isinstance(self.prompt, int):
            return self.prompt
        return self.num_layers if self.prompt == "full" else self.max_layers

    @property
    def prompt_layers(self) -> tuple[int, ...]:
        """Indices of the layers that hold the prompt, ascending; they include those of every generated token."""
        return self.layers_for(self.prompt_budget)

    @property
    def prompt_depth(self) -> int:
        """The number of layers that the prompt's tokens, except its last one, run."""
        return min(self.prompt_budget, self.prompt_stop or self.prompt_budget)

    @property
    def stopped_layers(self) -> tuple[int, ...]:
        """The layers of `prompt_layers` above `prompt_stop`, which only the prompt's last token runs."""
        return () if self.prompt_stop is None else self.prompt_layers[self.prompt_stop :]

    @property
    def skips(self) -> bool:
        """Whether any token, of the prompt or generated, runs fewer layers than the model has."""
        return self.min_layers < self.num_layers or bool(self.stopped_layers)

    def layers_for(self, budget: int) -> tuple[int, ...]:
        """Indices of the layers of a budget between min_layers and num_layers, ascending."""
        layers, warmup = range(self.num_layers), self.warmup_layers
        if self.order is not None:
            return tuple(sorted(self.order[:budget]))
        if self.placement == "even":
            return self._even_layers[budget]
        if self.placement == "bottom":
            lower = budget
        elif self.placement == "ends":
            lower = warmup + (budget - warmup) // 2
        else:
            lower = warmup
        return tuple(layers[:lower]) + tuple(layers[self.num_layers - (budget - lower) :])

    @cached_property
    def _even_layers(self) -> dict[int, tuple[int, ...]]:
        """The layers of each budget under even placement.

        A budget of max_layers is spread evenly. Each smaller budget drops the layer whose neighbours are closest, and
        each larger one (of prompts) adds the middle of the widest gap. This keeps the sets nested, which sets that are
        each spread evenly on their own would not be.
        """
        free, last = self.max_layers - self.warmup_layers, self.num_layers - 1
        span = last - (self.warmup_layers - 1)
        kept = list(range(self.warmup_layers)) + [
            last - (span * (free - j) + free // 2) // free for j in range(1, free + 1)
        ]
        sets = {self.max_layers: tuple(kept)}
        grown = kept.copy()
        while len(grown) < self.num_layers:
            below, above = max(pairwise([*grown, self.num_layers]), key=lambda pair: pair[1] - pair[0])
            grown = sorted([*grown, (below + above) // 2])
            sets[len(grown)] = tuple(grown)
        while len(kept) > self.min_layers:
            # The topmost layer, which feeds the LM head, is dropped only when no other free layer is left.
            candidates = range(self.warmup_layers, max(len(kept) - 1, self.warmup_layers + 1))
            gaps = {at: kept[min(at + 1, len(kept) - 1)] - kept[at - 1] for at in candidates}
            del kept[min(candidates, key=lambda at: (gaps[at], at))]
            sets[len(kept)] = tuple(kept)
        return sets

    def mean_budget(self, n: int) -> float:
        """Layers per generated token, over the first `n` steps."""
        if n < 1:
            raise ValueError(f"n is {n}: a mean needs at least one step")
        before = self._budgets[:n]
        return (sum(before) + self.min_layers * (n - len(before))) / n

    def cutoffs(self, n: int) -> tuple[int, ...]:
        """For each layer, how many of the first `n` steps run it; the prompt's positions aren't counted."""
        counts = [0] * self.num_layers
        for i in range(min(n, len(self._budgets))):
            for layer in self.layers_at(i):
                counts[layer] += 1
        for layer in self.layers_for(self.min_layers):
            counts[layer] += max(0, n - len(self._budgets))
        return tuple(counts)

    def position_cutoffs(self, prompt_columns: int, positions: int) -> tuple[int, ...]:
        """For each layer, the number of a batch's positions that run it; they are always the first ones.

        The first `prompt_columns` positions hold the prompt, position `prompt_columns + i` holds generated token i.

        >>> SkipSchedule(num_layers=4, max_layers=3, min_layers=2, horizon=2).position_cutoffs(5, 8)
        (8, 5, 6, 8)
        """
        if not 0 < prompt_columns <= positions:
            raise ConfigError(
                f"prompt_columns is {prompt_columns}: it must lie between 1 and the number of positions ({positions})"
            )
        on_prompt = set(self.prompt_layers)
        generated = self.cutoffs(positions - prompt_columns)
        return tuple(prompt_columns * (layer in on_prompt) + count for layer, count in enumerate(generated))

    def stopped_positions(self, prompt_columns: int) -> tuple[int, ...]:
        """For each layer, the number of prompt positions that only give it keys and values (see `prompt_stop`).

        >>> SkipSchedule(num_layers=4, max_layers=3, min_layers=2, prompt_stop=2).stopped_positions(5)
        (0, 0, 4, 4)
        """
        stopped = set(self.stopped_layers)
        return tuple((prompt_columns - 1) * (layer in stopped) for layer in range(self.num_layers))

    def computed_share(self, prompt_columns: int, positions: int) -> float:
        """The fraction of all (layer, position) pairs that a training step computes: 1.0 at full depth."""
        return sum(self.position_cutoffs(prompt_columns, positions)) / (self.num_layers * positions)

    column_cutoffs = renamed("column_cutoffs", "position_cutoffs")
    stopped_columns = renamed("stopped_columns", "stopped_positions")
    column_share = renamed("column_share", "computed_share")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, which `from_dict` reads back."""
        values = asdict(self)
        for name in ("prompt_stop", "order"):  # left out where unset, for versions that don't know these fields
            if values[name] is None:
                del values[name]
        if self.order is not None:
            values["order"] = list(self.order)  # JSON has no tuples
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SkipSchedule":
        """The schedule that `to_dict` described. Raises ConfigError for an unknown or missing field."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"not a schedule: expected a mapping of its fields, got {values!r}")
        names = [field.name for field in fields(cls)]
        for key in values:
            if key not in names:
                raise unknown("schedule field", str(key), names)
        for key in ("num_layers", "max_layers", "min_layers"):
            if key not in values:
                raise ConfigError(f"schedule field {key!r} is missing")
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SkipSchedule":
        """Read a schedule from a JSON file that `to_json` wrote. Raises ConfigError, which names the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, TypeError) as error:
            raise ConfigError(f"schedule file {str(path)!r} can't be read: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"schedule file {str(path)!r}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> "SkipSchedule":
        """The schedule that `to_json` wrote. Raises ConfigError where the text isn't one."""
        try:
            values = parse_json(text)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"not a schedule: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"not a schedule: expected a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)
