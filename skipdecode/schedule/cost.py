"""The cost of a decode step: the bytes it must read, the operations it must do, and the time that follows.

A step at batch size 1 is bound by the weights and the cache that it reads; at a large batch by its arithmetic. Both are
counted for everything that a step touches: the layers that run, the LM head, the embeddings and the cache, so that a
target speedup is one for the wall clock and not for the number of layers.
"""

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
    """The rates that a machine sustains, by default the datasheet's of an A100 80GB. Only their ratio matters here."""

    bytes_per_second: float = 2.0e12
    operations_per_second: float = 312e12


# By name, for checkpoints and their settings. On a CPU, arithmetic is what prompts and batches take: a dozen operations
# a byte, as two cores of an EPYC 9004 measure in bfloat16 (370 GFLOP/s, 30 GB/s), where an A100 has 156.
MACHINES = {"gpu": Machine(), "cpu": Machine(3.0e10, 3.7e11)}


class Cost(ABC):
    """The time that a batch takes under conditions that are settled: prompt, batch, texts and machine.

    Attributes:
        num_layers: decoder layers.
        batch_size: rows that start together; those whose text has ended leave.
        expected_steps: that texts take; None where each is as long as the schedule's horizon.
        stopped_share: of the time that a layer takes of a prompt, what it takes where the prompt has stopped.
        margin: what a target is multiplied by where a schedule is solved for it.
    """

    num_layers: int
    batch_size: int = 1
    expected_steps: Steps | None = None
    stopped_share: float = 1.0
    margin: float = 1.0

    @abstractmethod
    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time of decode step `step` (0-based) in which `rows` rows (None: the batch) run `layers` layers."""

    def prefill_seconds(self, layers: int) -> float:
        """The time of the prompts' pass through `layers` layers. Raises ConfigError where that isn't known."""
        raise ConfigError("over is 'all': this cost doesn't know what prompts take; expected over='decode'")

    def prompt_seconds(self, schedule: SkipSchedule) -> float:
        """The time of the prompts' pass under `schedule`. Raises ConfigError where that isn't known."""
        layers, stop = schedule.prompt_budget, schedule.prompt_depth
        if stop == layers:
            return self.prefill_seconds(layers)
        stopped = self.prefill_seconds(stop)
        last = self.step_seconds(layers, 0) - self.step_seconds(stop, 0)  # of the last token of each prompt
        return stopped + self.stopped_share * (self.prefill_seconds(layers) - stopped) + last

    def start_seconds(self, layers: int, prompt_layers: int) -> float:
        """What a batch's decoding takes once, beyond its steps, the first of `layers` layers, behind such prompts."""
        return 0.0

    def decode_seconds(self, schedule: SkipSchedule, steps: int | None = None) -> float:
        """The time of a batch's first `steps` decode steps under `schedule`, all rows alive; None: of whole texts."""
        whole = self.expected_steps if steps is None else None
        count = len(whole) if whole is not None else schedule.horizon if steps is None else steps
        budgets = [schedule.budget(i) for i in range(count)]
        if not budgets:
            return 0.0
        tables = {layers: self._seconds_by_step(layers, count, whole) for layers in set(budgets)}
        start = self.start_seconds(budgets[0], schedule.prompt_budget) * (1 if whole is None else whole[0][0])
        return start + sum([tables[layers][i] for i, layers in enumerate(budgets)])

    def _seconds_by_step(self, layers: int, steps: int, whole: Steps | None) -> list[float]:
        """The time of each step that runs so many layers; of `whole` texts, times how likely it is run."""
        found = self._tables.get((layers, whole is None), [])
        if len(found) < steps:  # a new list, as another thread may be reading the old one
            if whole is not None:
                found = [run * self.step_seconds(layers, step, rows) for step, (run, rows) in enumerate(whole)]
            else:
                found = [self.step_seconds(layers, step) for step in range(steps)]
            self._tables[layers, whole is None] = found
        return found

    @cached_property
    def _tables(self) -> dict[tuple[int, bool], list[float]]:
        return {}

    @cached_property
    def _at_full_depth(self) -> dict[tuple[int, int | None, Over], float]:
        return {}

    def seconds(self, schedule: SkipSchedule, steps: int | None = None, *, over: Over = "decode") -> float:
        """The time of decoding as in `decode_seconds`, and over "all" of the prompts before."""
        decode = self.decode_seconds(schedule, steps)
        return decode if over == "decode" else self.prompt_seconds(schedule) + decode

    def speedup(self, schedule: SkipSchedule, steps: int | None = None, *, over: Over = "decode") -> float:
        """The speed of a batch over that at full depth.

        Args:
            schedule: of the model's depth.
            steps: decode steps; None for those of whole texts, or the schedule's horizon.
            over: "decode", or "all" for prompts and decoding together.

        Raises:
            ConfigError: for a schedule of another depth, another `over`, texts without a decode step, and prompts of
                which the cost isn't known.
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
            texts = "steps is 0" if steps == 0 else "lengths are all of 1 token, which comes from the prompt"
            raise ConfigError(f"{texts}: there is no decode step")
        return known[key] / self.seconds(schedule, steps, over=over)


@dataclass(frozen=True)
class MeasuredCost(Cost):
    """A batch as it was timed on one machine (`skipdecode.timing.calibrate.measure_cost`).

    Attributes:
        num_layers: decoder layers.
        seconds_by_layers: layers -> seconds of a step that runs so many, of at least two different numbers of layers;
            between them time is taken to be a straight line. 1 and `num_layers` are among them.
        batch_size: rows of the batch.
        expected_steps: that texts take; None where each is as long as the schedule's horizon.
        prefill: the same of the prompts' pass; empty where it wasn't timed.
        start: the same of what decoding takes once beyond its steps: the first of them finds caches cold, and what
            every call of the kernels needs is made ready; empty where it wasn't timed.
        cold: seconds that it takes more where prompts run all layers and the first step one: caches then hold the
            others. In proportion to the layers that prompts alone run.
        fewer_rows: rows -> layers -> seconds of a step, of fewer rows than the batch's.
        later: the cost of the steps that come so many steps later, whose cache is longer; between, time is taken to be
            a straight line. None where that makes no difference.
        stopped_share: as of a Cost.
        margin: as of a Cost: what batches take scatters by some percent around what was measured.
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
        """The time of a step that runs `layers` layers."""
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
        """The time of the prompts' pass through `layers` layers. Raises ConfigError where it wasn't timed."""
        return interpolated(self.prefill, layers) if self.prefill else super().prefill_seconds(layers)

    def start_seconds(self, layers: int, prompt_layers: int) -> float:
        """What decoding takes once; nothing where that wasn't timed."""
        cold = self.cold * max(0, prompt_layers - layers) / max(1, self.num_layers - 1)
        return (interpolated(self.start, layers) if self.start else 0.0) + cold


def interpolated(times: Mapping[int, float], at: float) -> float:
    """The value at a number between those that are known, on the straight line between its neighbours."""
    if at in times:
        return times[int(at)]
    below = max(n for n in times if n < at)
    above = min(n for n in times if n > at)
    share = (at - below) / (above - below)
    return times[below] * (1 - share) + times[above] * share


@dataclass(frozen=True)
class CostModel:
    """The sizes of a model that a decode step touches; `at` makes a Cost of them.

    Attributes:
        num_layers: decoder layers.
        layer_parameters: parameters of one layer.
        head_parameters: parameters of the LM head, which every step reads whole (also where it is tied).
        other_parameters: parameters outside layers, head and embeddings: final norm, projections.
        embedding_values: values of embedding rows that one token reads.
        cache_values: keys and values that one layer holds for one token.
        stopped_share: of a layer's parameters, those that make keys and values, which are all that it computes of a
            prompt that has stopped (`SkipSchedule.prompt_stop`), where they lie apart from those of queries.
        value_bytes: bytes of a cached value, of an embedding's, and of a weight.
        weight_bytes: bytes of a weight where it is kept in another type, such as 1 for int8.
        head_bytes: bytes of a weight of the LM head, where that is kept in yet another.
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
        """Count a model, or the model that a config describes (built without memory).

        Args:
            model: a causal language model, wrapped or not, or a config.
            dtype: of weights and cache; by default the model's or the config's own, else float32.
        """
        if isinstance(model, PretrainedConfig):
            with torch.device("meta"):
                built: nn.Module = AutoModelForCausalLM.from_config(model)
            return cls.of(built, dtype or getattr(model, "dtype", None) or torch.float32)
        inner: PreTrainedModel = unwrap(model)
        layers = decoder_layers(inner)
        config = text_config(inner.config)
        head = inner.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(inner).__name__} has no LM head: pass the causal language model itself")
        embeddings = [module for module in inner.modules() if isinstance(module, nn.Embedding)]
        in_layers = count_parameters(layers.parameters())
        everything = count_parameters(inner.parameters())  # a tied head counts once, as the embedding that it is
        apart = count_parameters([*(e.weight for e in embeddings), *head.parameters()])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        made = config.hidden_size * head_dim * 2 * heads  # keys and values
        return cls(
            num_layers=len(layers),
            layer_parameters=in_layers // len(layers),
            head_parameters=count_parameters(head.parameters()),
            other_parameters=everything - in_layers - apart,
            embedding_values=sum(e.embedding_dim for e in embeddings),
            cache_values=2 * heads * head_dim,
            value_bytes=(dtype or inner.dtype).itemsize,
            stopped_share=made / (in_layers // len(layers)),
        )

    def stored_as(self, weights: str | None) -> "CostModel":
        """The same with weights as `skip_generate` stores a kind of them."""
        eight, four = 1.0, 4.5 / 8  # groups of 32 with a scale of 16 bits
        stored: dict[str, tuple[float, float | None]] = {"int8": (eight, None), "int4": (four, None)}
        stored |= {"int4-int8-head": (four, eight), "int8-int4-head": (eight, four)}
        layers, head = stored.get(str(weights), (self.weight_bytes, self.head_bytes))
        return replace(self, weight_bytes=layers, head_bytes=head)

    def step_bytes(self, layers: float, context: int, batch_size: float = 1) -> float:
        """Bytes that a step of `layers` layers must read (and write to the cache), with `context` columns cached."""
        each = self.weight_bytes or self.value_bytes
        weights = (layers * self.layer_parameters + self.other_parameters) * each
        weights += self.head_parameters * (self.head_bytes or each)
        for_each_row = self.embedding_values + layers * self.cache_values * (context + 1)
        return weights + self.value_bytes * batch_size * for_each_row

    def cache_bytes(self, schedule: SkipSchedule, prompt_columns: int, steps: int, batch_size: int = 1) -> int:
        """Bytes of the cache that `steps` decode steps need (law 6): `PlannedCache` allocates as many."""
        columns = sum(prompt_columns + count for count in schedule.cutoffs(steps) if count)
        return self.value_bytes * batch_size * self.cache_values * columns

    def step_operations(self, layers: int, context: int, batch_size: float = 1) -> float:
        """Multiplications and additions of a step: two for each weight and cached value, for each row."""
        weights = layers * self.layer_parameters + self.head_parameters + self.other_parameters
        return 2 * batch_size * (weights + layers * self.cache_values * (context + 1))

    def prefill_bytes(self, layers: int, columns: int, batch_size: int = 1) -> float:
        """Bytes that prompts of `columns` columns must read and write in `layers` layers."""
        return self.step_bytes(layers, 0, batch_size) + self.value_bytes * batch_size * (columns - 1) * (
            self.embedding_values + layers * self.cache_values
        )

    def prefill_operations(self, layers: int, columns: int, batch_size: int = 1) -> int:
        """Multiplications and additions of prompts' pass through `layers` layers; the head is for one column."""
        attended = layers * self.cache_values * columns * (columns + 1) // 2
        once = self.head_parameters + self.other_parameters
        return 2 * batch_size * (columns * layers * self.layer_parameters + attended + once)

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
        """The cost of a batch under conditions.

        Args:
            prompt_length: columns in the cache when decoding starts; by default the mean of `prompt_lengths`, else 64.
            prompt_lengths: tokens of prompts, as `Lengths.read` takes them.
            lengths: tokens of the texts that are generated, likewise; without them each is as long as the horizon.
            expected_steps: that they take, where more is known than `lengths` say.
            batch_size: rows that decode together.
            machine: what the machine sustains, or a name in MACHINES; by default "gpu".

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
    """A batch as a model's sizes predict it; its attributes are those of `CostModel.at`."""

    model: CostModel
    prompt_length: int
    batch_size: int = 1
    expected_steps: Steps | None = None
    machine: Machine = Machine()

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_layers", self.model.num_layers)
        object.__setattr__(self, "stopped_share", self.model.stopped_share)

    def step_seconds(self, layers: int, step: int, rows: float | None = None) -> float:
        """The time of a step: the larger of what its bytes and what its operations take (the roofline)."""
        context, rows = self.prompt_length + step, self.batch_size if rows is None else rows
        return self._roofline(
            self.model.step_bytes(layers, context, rows), self.model.step_operations(layers, context, rows)
        )

    def prefill_seconds(self, layers: int) -> float:
        """The time of the prompts' pass, likewise."""
        return self._roofline(
            self.model.prefill_bytes(layers, self.prompt_length, self.batch_size),
            self.model.prefill_operations(layers, self.prompt_length, self.batch_size),
        )

    def _roofline(self, read: float, operations: float) -> float:
        return max(read / self.machine.bytes_per_second, operations / self.machine.operations_per_second)


def depth_mismatch(schedule: SkipSchedule, num_layers: int) -> str:
    """The message about a schedule that was made for another depth."""
    return (
        f"the schedule is for {schedule.num_layers} layers, the model has {num_layers}: "
        "make one with num_layers equal to the model's"
    )


def count_parameters(parameters: Iterable[torch.Tensor]) -> int:
    """Elements of distinct parameters; ZeRO-3's empty shards are counted by their whole size."""
    distinct = {id(p): p for p in parameters}
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in distinct.values())
