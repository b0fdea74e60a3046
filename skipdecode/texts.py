"""Texts from prompts, with the time and the layers that they took: what the command line does with a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from skipdecode.checkpoint import SkipConfig
from skipdecode.clock import StepClock
from skipdecode.cost import CostModel
from skipdecode.decode import resolve_schedule, skip_generate
from skipdecode.errors import ConfigError
from skipdecode.families import text_config
from skipdecode.projections import Weights
from skipdecode.schedule import SkipSchedule


@dataclass(frozen=True)
class Completion:
    """What follows one prompt.

    Attributes:
        prompt, text: without special tokens.
        tokens: that were generated, the end token among them.
        layers: that they ran after the prompt, on average; the first token comes from the prompt's pass.
    """

    prompt: str
    text: str
    tokens: int
    layers: float


@dataclass(frozen=True)
class Decoded:
    """What one call gave for a batch of prompts, or the sums of several calls.

    Attributes:
        completions: one for each prompt.
        prefill_seconds, decode_seconds: wall clock, to the first tokens and from there on.
        steps: decode steps of the batch.
    """

    completions: tuple[Completion, ...]
    prefill_seconds: float
    decode_seconds: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens after each prompt's first, per second of decoding."""
        tokens = sum(max(0, completion.tokens - 1) for completion in self.completions)
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def layers_per_token(self) -> float:
        """Over the tokens after each prompt's first."""
        weights = [max(0, completion.tokens - 1) for completion in self.completions]
        layers = sum(n * completion.layers for n, completion in zip(weights, self.completions, strict=True))
        return layers / sum(weights) if any(weights) else 0.0

    def __add__(self, other: "Decoded") -> "Decoded":
        return Decoded(
            self.completions + other.completions,
            self.prefill_seconds + other.prefill_seconds,
            self.decode_seconds + other.decode_seconds,
            self.steps + other.steps,
        )


class Decoder:
    """A checkpoint that decodes prompts under schedules.

    Args:
        model, tokenizer: as `skipdecode.load` gives them.
        max_new_tokens: of each prompt.
        weights: as in `skip_generate`.
        sampling: generate's settings, such as `do_sample` and `temperature`; greedy without.

    Raises:
        ConfigError: where the model hasn't the positions for a single token more than `max_new_tokens`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        weights: Weights | None = None,
        **sampling: Any,
    ) -> None:
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self._request = {"max_new_tokens": max_new_tokens, "weights": weights, "do_sample": False, **sampling}
        self._positions = getattr(text_config(model.config), "max_position_embeddings", None)

    def schedule(self, speedup: float) -> SkipSchedule:
        """The checkpoint's schedule for a target. Raises ConfigError as `skip_generate` does."""
        return resolve_schedule(self.model, None, speedup)

    def check(self, prompts: Sequence[str]) -> None:
        """Raises ConfigError for a prompt that is empty, or longer than the model has positions for."""
        new = int(self._request["max_new_tokens"])
        for number, ids in enumerate(self.tokenizer(list(prompts))["input_ids"], start=1):
            if not ids:
                raise ConfigError(f"prompt {number} is empty")
            if self._positions is not None and len(ids) + new - 1 > self._positions:
                raise ConfigError(
                    f"prompt {number} has {len(ids)} tokens: with {new} new ones that is beyond the model's "
                    f"{self._positions} positions; shorten it, or lower --max-new-tokens"
                )

    def decode(self, prompts: Sequence[str], schedule: SkipSchedule, streamer: Any = None) -> Decoded:
        """Decode prompts together. Raises ConfigError as `skip_generate` does."""
        inputs = self.tokenizer(list(prompts), return_tensors="pt", padding=True).to(self.model.device)
        clock = StepClock(self.model.device)
        ids = self.model.generate(
            **{name: inputs[name] for name in ("input_ids", "attention_mask")},
            custom_generate=skip_generate,
            schedule=schedule,
            stopping_criteria=StoppingCriteriaList([clock]),
            streamer=streamer,
            **{name: value for name, value in self._request.items() if value is not None},
        )
        new = ids[:, inputs["input_ids"].shape[1] :]
        completions = tuple(self._completion(*pair, schedule) for pair in zip(prompts, new, strict=True))
        return Decoded(completions, clock.prefill_seconds, clock.decode_seconds, clock.steps)

    def _completion(self, prompt: str, ids: torch.Tensor, schedule: SkipSchedule) -> Completion:
        ends = self.model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        count = next((n for n, token in enumerate(ids.tolist(), start=1) if token in ends), len(ids))
        text = self.tokenizer.decode(ids[:count], skip_special_tokens=True)
        return Completion(prompt, text, count, schedule.mean_budget(count - 1) if count > 1 else 0.0)


@dataclass(frozen=True)
class Compared:
    """The same prompts at several speeds.

    Attributes:
        speedups: targets, 1 first.
        decoded: what each gave, in the same order.
        measured: times each decode step is faster than at full depth, the median over repeats.
    """

    speedups: tuple[float, ...]
    decoded: tuple[Decoded, ...]
    measured: tuple[float, ...]


def compare(decoder: Decoder, prompts: Sequence[str], speedups: Sequence[float], repeats: int) -> Compared:
    """Decode prompts at full depth and at each target, in turns, so that a busy machine treats all alike.

    A first round that isn't counted warms up. Raises ConfigError as `skip_generate` does.
    """
    targets = (1.0, *(speedup for speedup in speedups if speedup != 1))
    schedules = [decoder.schedule(target) for target in targets]
    rounds = []
    for number in range(repeats + 1):
        found = [decoder.decode(prompts, schedule) for schedule in schedules]
        if number or not repeats:
            rounds.append(found)
    seconds = [[turn.decode_seconds / max(1, turn.steps) for turn in found] for found in rounds]
    measured = []
    for n in range(len(targets)):
        ratios = sorted(of[0] / of[n] if of[n] else 1.0 for of in seconds)
        measured.append(ratios[len(ratios) // 2])
    return Compared(targets, tuple(rounds[-1]), tuple(measured))


@dataclass(frozen=True)
class Price:
    """What a target costs.

    Attributes:
        speedup: the target.
        schedule: the checkpoint's for it.
        layers: per token, over the new tokens.
        predicted: times a decode step is faster by the bytes that it reads (`CostModel`).
        cache_bytes: keys and values held (law 6).
        trained: whether training drew this target.
    """

    speedup: float
    schedule: SkipSchedule
    layers: float
    predicted: float
    cache_bytes: int
    trained: bool


def price(
    decoder: Decoder, speedups: Sequence[float], *, batch_size: int, prompt_length: int, new_tokens: int
) -> list[Price]:
    """The price of each target, by the cost model. Raises ConfigError for a target out of reach."""
    cost = CostModel.of(decoder.model)
    config = SkipConfig.of(decoder.model.config)
    found = []
    for speedup in speedups:
        schedule = decoder.schedule(speedup)
        found.append(
            Price(
                speedup,
                schedule,
                schedule.mean_budget(new_tokens),
                cost.speedup(schedule, prompt_length=prompt_length, batch_size=batch_size),
                cost.cache_bytes(schedule, prompt_length, new_tokens, batch_size),
                config is not None and float(speedup) in config.schedules,
            )
        )
    return found
