"""The cost of a decode step: the bytes it must read, the operations it must do, and the time that follows.

A step at batch size 1 is bound by the weights and the cache that it reads; at a large batch by its arithmetic. Both are
counted for everything that a step touches: the layers that run, the LM head, the embeddings and the cache, so that a
target speedup is one for the wall clock and not for the number of layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import decoder_layers, text_config, unwrap
from skipdecode.schedule import SkipSchedule


@dataclass(frozen=True)
class Machine:
    """The rates that a machine sustains, by default the datasheet's of an A100 80GB. Only their ratio matters here."""

    bytes_per_second: float = 2.0e12
    operations_per_second: float = 312e12


class Cost(ABC):
    """The time that decode steps take under conditions that are settled: prompt, batch and machine.

    Attributes:
        num_layers: decoder layers.
    """

    num_layers: int

    @abstractmethod
    def step_seconds(self, layers: int, step: int) -> float:
        """The time of decode step `step` (0-based) where it runs `layers` layers."""

    def decode_seconds(self, schedule: SkipSchedule, steps: int) -> float:
        """The time of the first `steps` decode steps under `schedule`."""
        return sum(self.step_seconds(schedule.budget(i), i) for i in range(steps))

    def speedup(self, schedule: SkipSchedule, steps: int | None = None) -> float:
        """The speed of the first `steps` steps (the horizon by default) over that of full depth.

        Raises ConfigError for a schedule of another depth.
        """
        if schedule.num_layers != self.num_layers:
            raise ConfigError(depth_mismatch(schedule, self.num_layers))
        steps = steps or schedule.horizon
        full = SkipSchedule.full_depth(self.num_layers, schedule.horizon)
        return self.decode_seconds(full, steps) / self.decode_seconds(schedule, steps)


@dataclass(frozen=True)
class MeasuredCost(Cost):
    """Steps as they were timed on one machine, at one batch size and length (`skipdecode.calibrate.measure_cost`).

    Attributes:
        num_layers: decoder layers.
        seconds: layers -> seconds of a step that runs so many, of at least two different numbers of layers; between
            them time is taken to be a straight line. 1 and `num_layers` are among them.
    """

    num_layers: int
    seconds: Mapping[int, float]

    def step_seconds(self, layers: int, step: int) -> float:
        """The time of a step that runs `layers` layers; the same for every step."""
        if layers in self.seconds:
            return self.seconds[layers]
        below = max(n for n in self.seconds if n < layers)
        above = min(n for n in self.seconds if n > layers)
        share = (layers - below) / (above - below)
        return self.seconds[below] * (1 - share) + self.seconds[above] * share


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
        value_bytes: bytes of a cached value, of an embedding's, and of a weight.
        weight_bytes: bytes of a weight where it is kept in another type, such as 1 for int8.
    """

    num_layers: int
    layer_parameters: int
    head_parameters: int
    other_parameters: int
    embedding_values: int
    cache_values: int
    value_bytes: int
    weight_bytes: int | None = None

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
        return cls(
            num_layers=len(layers),
            layer_parameters=in_layers // len(layers),
            head_parameters=count_parameters(head.parameters()),
            other_parameters=everything - in_layers - apart,
            embedding_values=sum(e.embedding_dim for e in embeddings),
            cache_values=2 * heads * head_dim,
            value_bytes=(dtype or inner.dtype).itemsize,
        )

    def step_bytes(self, layers: int, context: int, batch_size: int = 1) -> int:
        """Bytes that a step of `layers` layers must read (and write to the cache), with `context` columns cached."""
        weights = layers * self.layer_parameters + self.head_parameters + self.other_parameters
        for_each_row = self.embedding_values + layers * self.cache_values * (context + 1)
        return weights * (self.weight_bytes or self.value_bytes) + self.value_bytes * batch_size * for_each_row

    def cache_bytes(self, schedule: SkipSchedule, prompt_columns: int, steps: int, batch_size: int = 1) -> int:
        """Bytes of the cache that `steps` decode steps need (law 6): `PlannedCache` allocates as many."""
        columns = sum(prompt_columns + count for count in schedule.cutoffs(steps) if count)
        return self.value_bytes * batch_size * self.cache_values * columns

    def step_operations(self, layers: int, context: int, batch_size: int = 1) -> int:
        """Multiplications and additions of a step: two for each weight and cached value, for each row."""
        weights = layers * self.layer_parameters + self.head_parameters + self.other_parameters
        return 2 * batch_size * (weights + layers * self.cache_values * (context + 1))

    def at(self, *, prompt_length: int = 64, batch_size: int = 1, machine: Machine | None = None) -> "PredictedCost":
        """The cost of decode steps under conditions.

        Args:
            prompt_length: columns in the cache when decoding starts.
            batch_size: rows that decode together.
            machine: what the machine sustains.

        Raises:
            ConfigError: for counts below 1.
        """
        return PredictedCost(self, prompt_length, batch_size, machine or Machine())


@dataclass(frozen=True)
class PredictedCost(Cost):
    """Steps as a model's sizes predict them; its attributes are those of `CostModel.at`."""

    model: CostModel
    prompt_length: int
    batch_size: int
    machine: Machine

    def __post_init__(self) -> None:
        check_counts(prompt_length=self.prompt_length, batch_size=self.batch_size)
        object.__setattr__(self, "num_layers", self.model.num_layers)

    def step_seconds(self, layers: int, step: int) -> float:
        """The time of a step: the larger of what its bytes and what its operations take (the roofline)."""
        context = self.prompt_length + step
        return max(
            self.model.step_bytes(layers, context, self.batch_size) / self.machine.bytes_per_second,
            self.model.step_operations(layers, context, self.batch_size) / self.machine.operations_per_second,
        )


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
