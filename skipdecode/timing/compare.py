"""Completions of prompts with their times and layers: what the command line does with a checkpoint."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.errors import ConfigError
from skipdecode.families import longest_sequence
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.lossless_loop import DraftCounts
from skipdecode.generate.skip_generate import check_unhealed, choose_draft, resolve_plan, skip_generate
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import Cost, CostModel
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.timing.agreement import agreeing_tokens
from skipdecode.timing.interleave import Ratio, order_of_turn
from skipdecode.timing.step_clock import generate_timed

# `compare` repeats rounds until decoding at full depth has taken MIN_SECONDS, MAX_ROUNDS at most: a short completion
# takes milliseconds, which other work on the machine can distort.
MIN_SECONDS, MAX_ROUNDS = 1.0, 25
MIN_TOKENS = 3  # that can be timed: the first comes from the prefill, and a single step is too short


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        prompt, text: without special tokens.
        ids: new tokens, including the end token.
        layers: mean layers of the new tokens after the first, which comes from the prefill. With lossless decoding:
            layers of all passes of the batch, of drafts and at full depth, divided by its steps.
    """

    prompt: str
    text: str
    ids: tuple[int, ...]
    layers: float

    @property
    def tokens(self) -> int:
        """Number of new tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class Decoded:
    """The completions of a batch of prompts and their times, or the sums of several batches.

    Attributes:
        completions: one for each prompt.
        prefill_seconds, decode_seconds: wall-clock times up to the first tokens, and from there on.
        steps: number of decode steps of the batch.
    """

    completions: tuple[Completion, ...]
    prefill_seconds: float
    decode_seconds: float
    steps: int

    @property
    def seconds(self) -> float:
        """End-to-end time: prefill and decode."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens after each first one, per second of decoding."""
        tokens = sum(max(0, completion.tokens - 1) for completion in self.completions)
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def layers_per_token(self) -> float:
        """Mean layers of the new tokens after each first one."""
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
        max_new_tokens: maximum for each prompt.
        weights: as in `skip_generate`.
        lossless, strict: as in `skip_generate`.
        sampling: generate's settings, such as `do_sample` and `temperature`; greedy by default.

    Raises:
        ConfigError: for `max_new_tokens` below 1, and for a checkpoint whose own settings request `token_healing`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        weights: Weights | None = None,
        lossless: bool = False,
        strict: bool = False,
        **sampling: Any,
    ) -> None:
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        self.model: Any = model
        check_unhealed(self.model.generation_config.token_healing)
        self.tokenizer: Any = tokenizer
        self.weights = weights
        self._lossless, self._strict = lossless, strict
        self._request = {"max_new_tokens": max_new_tokens, "weights": weights, "do_sample": False, **sampling}
        self._positions = longest_sequence(model.config)

    def plan(self, speedup: float, over: Over | None = None, prompts: Sequence[int] | None = None) -> SpeedPlan:
        """The plan for a target speedup of prompts of these lengths. Raises ConfigError as `skip_generate` does."""
        return resolve_plan(
            self.model,
            None,
            speedup,
            over=over,
            weights=self.weights,
            prompts=prompts,
            lossless=self._lossless,
            strict=self._strict,
        )

    def plan_of(self, prompts: Sequence[str], speedup: float, over: Over | None = None) -> SpeedPlan:
        """The plan for a target speedup of prompts that are decoded together."""
        return self.plan(speedup, over, self._tokens(prompts))

    def draft_schedule(self, prompts: Sequence[str], order: Sequence[int] | None = None) -> SkipSchedule:
        """The schedule that drafts for prompts that are decoded together, if no speedup is given.

        Raises ConfigError without an `order` of layers, if the checkpoint wasn't trained for a speedup.
        """
        do_sample = bool(self._request["do_sample"])
        tokens = self._tokens(prompts)
        return choose_draft(self.model, tokens, weights=self.weights, do_sample=do_sample, order=order)

    def _tokens(self, prompts: Sequence[str]) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self.tokenizer(list(prompts), verbose=False)["input_ids"]]

    def check(self, prompts: Sequence[str]) -> None:
        """Raise ConfigError for a prompt that is empty, isn't valid UTF-8, or exceeds the model's positions."""
        new = int(self._request["max_new_tokens"])
        for number, prompt in enumerate(prompts, start=1):
            if any("\ud800" <= mark <= "\udfff" for mark in prompt):
                raise ConfigError(f"prompt {number} is not valid UTF-8: {prompt[:40]!r}")
        for number, ids in enumerate(self.tokenizer(list(prompts), verbose=False)["input_ids"], start=1):
            if not ids:
                raise ConfigError(f"prompt {number} is empty")
            if self._positions is not None and len(ids) + new - 1 > self._positions:
                raise ConfigError(
                    f"prompt {number} has {len(ids)} tokens: with {new} new ones it needs more than the model's "
                    f"{self._positions} positions; shorten it, or lower --max-new-tokens"
                )

    def decode(
        self, prompts: Sequence[str], schedule: SkipSchedule, streamer: Any = None, *, tokens: int | None = None
    ) -> Decoded:
        """Decode prompts together, each with exactly `tokens` new tokens (None: up to its own end). The schedule says
        which layers run, or draft. Raises ConfigError as `skip_generate` does.
        """
        request = {name: value for name, value in self._request.items() if value is not None}
        if tokens is not None:
            request |= {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": self.tokenizer.pad_token_id}
            request["stop_strings"] = None
        inputs = self.tokenizer(list(prompts), return_tensors="pt", padding=True).to(self.model.device)
        counts = DraftCounts()
        if self._lossless:
            request |= {"lossless": True, "draft_counts": counts}
        timed = generate_timed(
            self.model,
            inputs["input_ids"],
            inputs["attention_mask"],
            custom_generate=skip_generate,
            schedule=schedule,
            streamer=streamer,
            tokenizer=self.tokenizer,  # for the checkpoint's own stop strings
            **request,
        )
        clock = timed.clock
        new = self._up_to_stops(timed.ids, inputs["input_ids"].shape[1])
        completions = tuple(self._completion(*pair, schedule) for pair in zip(prompts, new, strict=True))
        if self._lossless:
            layers = counts.layers / max(1, clock.steps)
            completions = tuple(replace(one, layers=layers if one.tokens > 1 else 0.0) for one in completions)
        return Decoded(completions, clock.prefill_seconds, clock.decode_seconds, clock.steps)

    def _up_to_stops(self, ids: torch.Tensor, prompt_length: int) -> list[torch.Tensor]:
        """The new tokens of each sequence, up to the checkpoint's own stop strings."""
        new = [*ids[:, prompt_length:]]
        stops = self.model.generation_config.stop_strings
        if not stops:
            return new
        stopped = StopStringCriteria(self.tokenizer, stops)
        lengths = range(prompt_length + 1, ids.shape[1] + 1)
        ends = torch.stack([stopped(ids[:, :length], None) for length in lengths], dim=1)  # [batch, new tokens]
        return [row[: end.tolist().index(True) + 1] if end.any() else row for row, end in zip(new, ends, strict=True)]

    def _completion(self, prompt: str, ids: torch.Tensor, schedule: SkipSchedule) -> Completion:
        ends = self.model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        count = next((n for n, token in enumerate(ids.tolist(), start=1) if token in ends), len(ids))
        own = tuple(ids[:count].tolist())
        text = self.tokenizer.decode(own, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(prompt, text, own, schedule.mean_budget(count - 1) if count > 1 else 0.0)


@dataclass(frozen=True)
class Pace:
    """Measurements of one target, medians over rounds: speedups over full depth in the same round, of decoding and
    end-to-end; tokens per second of decoding; times up to the first tokens, and from there on.
    """

    speedup: Ratio
    end_to_end: Ratio
    layers: float
    tokens_per_second: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Compared:
    """The same prompts decoded at several speedups.

    Attributes:
        plans: for the target speedups, 1 first.
        agreements: the share of tokens that full depth would have chosen, at each (`agreeing_tokens`).
        tokens: new tokens of each sequence that was timed: as many as the longest completion has.
        paces: measurements at each; empty if no completion is long enough to be timed.
    """

    plans: tuple[SpeedPlan, ...]
    decoded: tuple[Decoded, ...]
    agreements: tuple[float, ...]
    tokens: int
    rounds: int
    paces: tuple[Pace, ...]


def compare(
    decoder: Decoder, prompts: Sequence[str], speedups: Sequence[float], repeats: int, over: Over | None = None
) -> Compared:
    """Decode prompts at full depth and at each speedup, and time them in turns, so that other work on the machine
    affects all alike.

    Timed sequences have the same length at every speedup, so that the same steps are compared. There are `repeats`
    rounds after a warm-up, and more if rounds are very short. Raises ConfigError as `skip_generate` does.
    """
    speedups = (1.0, *(speedup for speedup in speedups if speedup != 1))
    plans = tuple(decoder.plan_of(prompts, speedup, over) for speedup in speedups)
    schedules = [plan.schedule for plan in plans]
    decoded = tuple(decoder.decode(prompts, schedule) for schedule in schedules)
    prompt_ids = decoder.tokenizer(list(prompts), verbose=False)["input_ids"]
    agreements = tuple(
        statistics.fmean(
            chain(*agreeing_tokens(decoder.model, prompt_ids, [completion.ids for completion in one.completions]))
        )
        for one in decoded
    )
    tokens = max(completion.tokens for one in decoded for completion in one.completions)
    if tokens < MIN_TOKENS:
        return Compared(plans, decoded, agreements, tokens, 0, ())
    for schedule in schedules:
        decoder.decode(prompts, schedule, tokens=tokens)
    timed: list[list[Decoded]] = [[] for _ in speedups]
    rounds = 0
    while rounds < repeats or (rounds < MAX_ROUNDS and sum(one.decode_seconds for one in timed[0]) < MIN_SECONDS):
        for at in order_of_turn(range(len(speedups)), rounds):
            timed[at].append(decoder.decode(prompts, schedules[at], tokens=tokens))
        rounds += 1
    full = timed[0]
    paces = tuple(
        Pace(
            Ratio.of([one.decode_seconds for one in full], [one.decode_seconds for one in own]),
            Ratio.of([one.seconds for one in full], [one.seconds for one in own]),
            schedule.mean_budget(tokens - 1),
            statistics.median(len(prompts) * (tokens - 1) / one.decode_seconds for one in own),
            statistics.median(one.prefill_seconds for one in own),
            statistics.median(one.decode_seconds for one in own),
        )
        for schedule, own in zip(schedules, timed, strict=True)
    )
    return Compared(plans, decoded, agreements, tokens, rounds, paces)


@dataclass(frozen=True)
class Price:
    """The predicted speed and memory of one speedup.

    Attributes:
        layers: mean layers per new token.
        predicted, end_to_end: predicted speedup of decoding, and end-to-end: by the calibrated profile of this machine,
            or without one by the analytical cost model (`CostModel`).
        cache_bytes: bytes of keys and values that the planned cache reserves.
        trained: whether the model was trained for exactly this speedup.
    """

    plan: SpeedPlan
    layers: float
    predicted: float
    end_to_end: float
    cache_bytes: int
    trained: bool


def price(
    decoder: Decoder,
    speedups: Sequence[float],
    *,
    over: Over | None = None,
    batch_size: int,
    prompt_length: int,
    new_tokens: int,
) -> list[Price]:
    """The predicted speed and memory of each speedup, for one length. Raises ConfigError as `Decoder.plan` does."""
    sizes = CostModel.of(decoder.model)
    profile = fast_path(decoder.model).profile(decoder.weights)
    cost: Cost = (profile or sizes).at(batch_size=batch_size, prompt_length=prompt_length)
    config = SkipConfig.of(decoder.model.config)
    found = []
    for speedup in speedups:
        plan = decoder.plan(speedup, over, [prompt_length] * batch_size)
        schedule = plan.schedule
        found.append(
            Price(
                plan,
                schedule.mean_budget(new_tokens),
                cost.speedup(schedule, new_tokens),
                cost.speedup(schedule, new_tokens, over="all"),
                sizes.cache_bytes(schedule, prompt_length, new_tokens, batch_size),
                config is not None and float(speedup) in config.schedules,
            )
        )
    return found
