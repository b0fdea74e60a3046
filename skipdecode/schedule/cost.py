"""Cost models: the wall-clock time of decode steps and prefills, predicted from sizes or interpolated from timings.

A step at batch size 1 is bound by the weights and KV cache that it reads, at a large batch by its arithmetic. The
analytical model counts both for everything that a step touches (the layers that run, LM head, embeddings and cache), so
that a target speedup is one of wall-clock time and not of the number of layers.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from skipdecode.errors import ConfigError, check_counts, unknown
from skipdecode.families import decoder_layers, text_config, unwrap
from skipdecode.schedule.lengths import Lengths, Steps
from skipdecode.schedule.schedule import Over, SkipSchedule


@dataclass(frozen=True)
class Machine:
    """The rates of a machine; by default those of an A100 80GB's datasheet. Only their ratio affects speedups."""

    bytes_per_second: float = 2.0e12
    operations_per_second: float = 312e12


# Machines by the names that checkpoints and recipes use. "cpu" has the rates of two cores of an EPYC 9004 in bfloat16:
# 12 operations per byte, where an A100 has 156, so prompts and batches are bound by arithmetic.
MACHINES = {"gpu": Machine(), "cpu": Machine(3.0e10, 3.7e11)}


class Cost(ABC):
    """The time that a batch takes for given prompt lengths, batch size, sequence lengths and machine.

    Attributes:
        num_layers: number of decoder layers.
        batch_size: number of sequences that start together; finished sequences leave the batch.
        expected_steps: the decode steps of the batch, see `Steps`; None where every sequence is as long as the
            schedule's horizon.
        stopped_share: the fraction of a layer's prefill time that it takes above the schedule's `prompt_stop`.
        margin: factor by which a target is raised when a schedule is solved for it.
    """

    num_layers: int
    batch_size: int = 1
    expected_steps: Steps | None = None
    stopped_share: float = 1.0
    margin: float = 1.0

    @abstractmethod
    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time of decode step `step` (0-based) when `rows` sequences (None: all) run `layers` layers."""

    def prefill_seconds(self, layers: int) -> float:
        """The time of the prefill through `layers` layers. Raises ConfigError where it isn't known."""
        raise ConfigError("over is 'all': this cost doesn't include the time of the prefill; expected over='decode'")

    def prompt_seconds(self, schedule: SkipSchedule) -> float:
        """The time of the prefill under `schedule`. Raises ConfigError where it isn't known."""
        layers, stop = schedule.prompt_budget, schedule.prompt_depth
        if stop == layers:
            return self.prefill_seconds(layers)
        stopped = self.prefill_seconds(stop)
        last_token = self.step_seconds(layers, 0) - self.step_seconds(stop, 0)  # it runs on above the stop
        return stopped + self.stopped_share * (self.prefill_seconds(layers) - stopped) + last_token

    def start_seconds(self, layers: int, prompt_layers: int) -> float:
        """The one-off time of decoding beyond its steps.

        Args:
            layers: number of layers of the first step.
            prompt_layers: number of layers of the prefill before it.
        """
        return 0.0

    def decode_seconds(self, schedule: SkipSchedule, steps: int | None = None) -> float:
        """The decoding time of a batch under `schedule`.

        Args:
            schedule: which layers each step runs.
            steps: number of decode steps, in which all sequences take part; None: the expected steps of the batch.
        """
        expected = self.expected_steps if steps is None else None
        count = len(expected) if expected is not None else schedule.horizon if steps is None else steps
        budgets = [schedule.budget(i) for i in range(count)]
        if not budgets:
            return 0.0
        tables = {layers: self._seconds_by_step(layers, count, expected) for layers in set(budgets)}
        start = self.start_seconds(budgets[0], schedule.prompt_budget) * (1 if expected is None else expected[0][0])
        return start + sum([tables[layers][i] for i, layers in enumerate(budgets)])

    def _seconds_by_step(self, layers: int, steps: int, expected: Steps | None) -> list[float]:
        """The time of each step if it runs `layers` layers, weighted by the probability of expected steps."""
        found = self._tables.get((layers, expected is None), [])
        if len(found) < steps:  # a new list, because another thread may be reading the old one
            if expected is not None:
                found = [likely * self.step_seconds(layers, step, rows) for step, (likely, rows) in enumerate(expected)]
            else:
                found = [self.step_seconds(layers, step) for step in range(steps)]
            self._tables[layers, expected is None] = found
        return found

    @cached_property
    def _tables(self) -> dict[tuple[int, bool], list[float]]:
        return {}

    @cached_property
    def _at_full_depth(self) -> dict[tuple[int, int | None, Over], float]:
        return {}

    def seconds(self, schedule: SkipSchedule, steps: int | None = None, *, over: Over = "decode") -> float:
        """The time of decoding as in `decode_seconds`, with over="all" including the prefill."""
        decode = self.decode_seconds(schedule, steps)
        return decode if over == "decode" else self.prompt_seconds(schedule) + decode

    def speedup(self, schedule: SkipSchedule, steps: int | None = None, *, over: Over = "decode") -> float:
        """The time of a batch at full depth divided by its time under `schedule`.

        Args:
            schedule: a schedule for the model's number of layers.
            steps: number of decode steps; None: the expected steps of the batch, or the schedule's horizon.
            over: "decode" for decoding alone, "all" for prefill and decoding.

        Raises:
            ConfigError: for a schedule of another number of layers, an unknown `over`, sequences without a decode step,
                or over="all" where the time of the prefill isn't known.
        """
        if schedule.num_layers != self.num_layers:
            raise ConfigError(depth_mismatch(schedule, self.num_layers))
        if over not in get_args(Over):
            raise unknown("over", str(over), get_args(Over))
        known = self._at_full_depth
        key = (schedule.horizon, steps, over)
        if key not in known:
            known[key] = self.seconds(SkipSchedule.full_depth(self.num_layers, schedule.horizon), steps, over=over)
        if not known[key]:
            cause = "steps is 0" if steps == 0 else "lengths are all 1 token, which the prefill predicts"
            raise ConfigError(f"{cause}: there is no decode step")
        return known[key] / self.seconds(schedule, steps, over=over)


@dataclass(frozen=True)
class MeasuredCost(Cost):
    """The cost of a batch, interpolated linearly from timings on one machine (`measure_cost`, `Profile.at`).

    Attributes:
        num_layers: number of decoder layers.
        seconds_by_layers: number of layers -> seconds of a step, for at least two numbers of layers. 1 and `num_layers`
            are among them.
        batch_size: number of sequences of the batch.
        expected_steps: as in Cost.
        prefill: number of layers -> seconds of the prefill; empty where it wasn't timed.
        start: number of layers -> seconds that decoding takes once beyond its steps, since the first step finds the
            processor's caches cold and kernels are prepared; empty where it wasn't timed.
        cold: seconds that the start takes longer when the prefill runs all layers and the first step one, because the
            processor's caches then hold other layers' weights. It is scaled by the number of layers that only the
            prefill runs.
        fewer_rows: batch size -> number of layers -> seconds of a step, for smaller batches than `batch_size`.
        later: (n, the cost of the steps from step n on, which have a longer KV cache); before step n, the time is
            interpolated. None where the cache's length makes no difference.
        stopped_share: as in Cost.
        margin: as in Cost; above 1 because the time of batches varies by a few percent.
    """

    num_layers: int
    seconds_by_layers: Mapping[int, float]
    batch_size: int = 1
    expected_steps: Steps | None = None
    prefill: Mapping[int, float] = field(default_factory=dict)
    start: Mapping[int, float] = field(default_factory=dict)
    fewer_rows: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    later: "tuple[int, MeasuredCost] | None" = None
    stopped_share: float = 1.0
    cold: float = 0.0
    margin: float = 1.0

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time of step `step` with `layers` layers."""
        if self.later is None or step == 0:
            return self._first_seconds(layers, rows)
        steps, cost = self.later
        if step >= steps:
            return cost.step_seconds(layers, step - steps, rows)
        share = step / steps
        return self._first_seconds(layers, rows) * (1 - share) + cost.step_seconds(layers, 0, rows) * share

    def _first_seconds(self, layers: int, rows: float | None) -> float:
        by_rows = {count: interpolated(times, layers) for count, times in self.fewer_rows.items()}
        by_rows[self.batch_size] = interpolated(self.seconds_by_layers, layers)
        return interpolated(by_rows, min(max(rows or self.batch_size, min(by_rows)), self.batch_size))

    def prefill_seconds(self, layers: int) -> float:
        """The time of the prefill through `layers` layers. Raises ConfigError where it wasn't timed."""
        return interpolated(self.prefill, layers) if self.prefill else super().prefill_seconds(layers)

    def start_seconds(self, layers: int, prompt_layers: int) -> float:
        """The one-off time of decoding; 0 where it wasn't timed."""
        cold = self.cold * max(0, prompt_layers - layers) / max(1, self.num_layers - 1)
        return (interpolated(self.start, layers) if self.start else 0.0) + cold


def interpolated(times: Mapping[int, float], at: float) -> float:
    """Interpolate linearly between the neighbours of `at`, which must lie within the known range."""
    if at in times:
        return times[int(at)]
    below = max(n for n in times if n < at)
    above = min(n for n in times if n > at)
    share = (at - below) / (above - below)
    return times[below] * (1 - share) + times[above] * share


@dataclass(frozen=True)
class CostModel:
    """The sizes of a model that determine the analytical cost of its steps; `at` gives the cost of a batch.

    Attributes:
        num_layers: number of decoder layers.
        layer_parameters: parameters of one layer.
        head_parameters: parameters of the LM head, all of which every step reads (also where it is tied).
        other_parameters: parameters outside layers, head and embeddings: final norm, projections.
        embedding_values: values of the embedding rows that one token reads.
        cache_values: values of keys and values together that one layer caches for one token.
        stopped_share: the fraction of a layer's parameters that compute keys and values, the only ones that a layer
            above `SkipSchedule.prompt_stop` uses for the prompt; projections fused with the queries' aren't considered.
        value_bytes: bytes of a cached value, an embedding value, and a weight.
        weight_bytes: bytes of a weight, where it is stored in another data type, such as 1 for int8.
        head_bytes: bytes of a weight of the LM head, where it is stored in another data type than the layers'.
    """

    num_layers: int
    layer_parameters: int
    head_parameters: int
    other_parameters: int
    embedding_values: int
    cache_values: int
    value_bytes: int
    weight_bytes: float | None = None
    stopped_share: float = 1.0
    head_bytes: float | None = None

    @classmethod
    def of(cls, model: nn.Module | PretrainedConfig, dtype: torch.dtype | None = None) -> "CostModel":
        """Count the parameters of a model, or of the model that a config describes (built on the meta device).

        Args:
            model: a causal language model, wrapped or not, or a config. One that another library quantised counts like
                its original.
            dtype: data type of weights and cache; default: the model's or the config's own, else float32.

        Raises:
            ConfigError: for a model without an LM head.
        """
        if isinstance(model, PretrainedConfig):
            plain = copy.deepcopy(model)
            plain.__dict__.pop("quantization_config", None)
            with torch.device("meta"):
                built: nn.Module = AutoModelForCausalLM.from_config(plain)
            return cls.of(built, dtype or getattr(model, "dtype", None) or torch.float32)
        inner: PreTrainedModel = unwrap(model)
        if getattr(inner.config, "quantization_config", None) is not None:  # its parameters hold several weights each
            return cls.of(inner.config, dtype or inner.dtype)
        layers = decoder_layers(inner)
        config = text_config(inner.config)
        head = inner.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(inner).__name__} has no LM head: pass the causal language model itself")
        embeddings = [module for module in inner.modules() if isinstance(module, nn.Embedding)]
        in_layers = count_parameters(layers.parameters())
        everything = count_parameters(inner.parameters())  # a tied head is counted once, as the embedding
        embeddings_and_head = count_parameters([*(e.weight for e in embeddings), *head.parameters()])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        key_and_value_weights = config.hidden_size * head_dim * 2 * heads
        return cls(
            num_layers=len(layers),
            layer_parameters=in_layers // len(layers),
            head_parameters=count_parameters(head.parameters()),
            other_parameters=everything - in_layers - embeddings_and_head,
            embedding_values=sum(e.embedding_dim for e in embeddings),
            cache_values=2 * heads * head_dim,
            value_bytes=(dtype or inner.dtype).itemsize,
            stopped_share=key_and_value_weights / (in_layers // len(layers)),
        )

    def stored_as(self, weights: str | None) -> "CostModel":
        """A copy whose weights have the sizes of `skip_generate`'s option `weights`, such as "int8"."""
        eight, four = 1.0, 4.5 / 8  # bytes; 4-bit weights have a 16-bit scale per group of 32
        stored: dict[str, tuple[float, float | None]] = {"int8": (eight, None), "int4": (four, None)}
        stored |= {"int4-int8-head": (four, eight), "int8-int4-head": (eight, four)}
        layers, head = stored.get(str(weights), (self.weight_bytes, self.head_bytes))
        return replace(self, weight_bytes=layers, head_bytes=head)

    def step_bytes(self, layers: float, context: int, batch_size: float = 1) -> float:
        """Bytes that a step of `layers` layers reads (and writes to the cache), with `context` positions cached."""
        weight_bytes = self.weight_bytes or self.value_bytes
        weights = (layers * self.layer_parameters + self.other_parameters) * weight_bytes
        weights += self.head_parameters * (self.head_bytes or weight_bytes)
        values_per_sequence = self.embedding_values + layers * self.cache_values * (context + 1)
        return weights + self.value_bytes * batch_size * values_per_sequence

    def cache_bytes(self, schedule: SkipSchedule, prompt_columns: int, steps: int, batch_size: int = 1) -> int:
        """Bytes of the KV cache that `steps` decode steps need, as `PlannedCache` allocates them."""
        slots = sum(prompt_columns + count for count in schedule.cutoffs(steps) if count)
        return self.value_bytes * batch_size * self.cache_values * slots

    def step_operations(self, layers: int, context: int, batch_size: float = 1) -> float:
        """Floating-point operations of a step: two per weight and cached value, for each sequence."""
        weights = layers * self.layer_parameters + self.head_parameters + self.other_parameters
        return 2 * batch_size * (weights + layers * self.cache_values * (context + 1))

    def prefill_bytes(self, layers: int, positions: int, batch_size: int = 1) -> float:
        """Bytes that the prefill of `positions` positions reads and writes in `layers` layers."""
        return self.step_bytes(layers, 0, batch_size) + self.value_bytes * batch_size * (positions - 1) * (
            self.embedding_values + layers * self.cache_values
        )

    def prefill_operations(self, layers: int, positions: int, batch_size: int = 1) -> int:
        """Floating-point operations of the prefill; the LM head runs on the last position only."""
        attended = layers * self.cache_values * positions * (positions + 1) // 2
        once = self.head_parameters + self.other_parameters
        return 2 * batch_size * (positions * layers * self.layer_parameters + attended + once)

    def at(
        self,
        *,
        prompt_length: int | None = None,
        prompt_lengths: Any = None,
        lengths: Any = None,
        expected_steps: Steps | None = None,
        batch_size: int = 1,
        machine: Machine | str | None = None,
    ) -> "PredictedCost":
        """The predicted cost of a batch.

        Args:
            prompt_length: number of positions in the KV cache when decoding starts; default: the mean of
                `prompt_lengths`, else 64.
            prompt_lengths: lengths of prompts in tokens, in any form that `Lengths.read` accepts.
            lengths: lengths of generated sequences, likewise; without them each is as long as the horizon.
            expected_steps: the decode steps of the batch, in place of `lengths`.
            batch_size: number of sequences that decode together.
            machine: the rates of the machine, or a name in MACHINES; default: "gpu".

        Raises:
            ConfigError: for counts below 1, and for an unknown machine.
        """
        if prompt_length is None:
            prompt_length = 64 if prompt_lengths is None else round(Lengths.read(prompt_lengths).mean)
        check_counts(prompt_length=prompt_length, batch_size=batch_size)
        if expected_steps is None and lengths is not None:
            expected_steps = Lengths.read(lengths).expected_steps(batch_size)
        if not isinstance(machine, Machine):
            if machine is not None and machine not in MACHINES:
                raise unknown("machine", str(machine), MACHINES)
            machine = MACHINES[machine or "gpu"]
        return PredictedCost(self, prompt_length, batch_size, expected_steps, machine)


@dataclass(frozen=True)
class PredictedCost(Cost):
    """The analytical cost of a batch; the attributes are the arguments of `CostModel.at`."""

    model: CostModel
    prompt_length: int
    batch_size: int = 1
    expected_steps: Steps | None = None
    machine: Machine = Machine()

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", self.model.num_layers)
        object.__setattr__(self, "stopped_share", self.model.stopped_share)

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time of a step: the larger of its memory time and its compute time (roofline model)."""
        context, rows = self.prompt_length + step, self.batch_size if rows is None else rows
        return self._roofline(
            self.model.step_bytes(layers, context, rows), self.model.step_operations(layers, context, rows)
        )

    def prefill_seconds(self, layers: int) -> float:
        """The time of the prefill, likewise."""
        return self._roofline(
            self.model.prefill_bytes(layers, self.prompt_length, self.batch_size),
            self.model.prefill_operations(layers, self.prompt_length, self.batch_size),
        )

    def _roofline(self, read: float, operations: float) -> float:
        return max(read / self.machine.bytes_per_second, operations / self.machine.operations_per_second)


def depth_mismatch(schedule: SkipSchedule, num_layers: int) -> str:
    """The message for a schedule that was made for another number of layers."""
    return (
        f"the schedule is for {schedule.num_layers} layers, the model has {num_layers}: "
        "make one with num_layers equal to the model's"
    )


def count_parameters(parameters: Iterable[torch.Tensor]) -> int:
    """The number of elements of distinct parameters; ZeRO-3's empty shards and 4-bit weights count in full."""
    return sum(_full_size(p) for p in {id(p): p for p in parameters}.values())


def _full_size(parameter: torch.Tensor) -> int:
    four_bit = getattr(parameter, "quant_state", None)  # of bitsandbytes, which packs two weights into a value
    return math.prod(four_bit.shape) if four_bit is not None else int(getattr(parameter, "ds_numel", parameter.numel()))
