"""Decoding a test set at several speeds, the speeds taking turns on each batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from data import Example, Task
from data.columns import Prompt, encode_prompts
from skipdecode import CostModel, SkipSchedule, skip_generate
from skipdecode.clock import StepClock
from skipdecode.families import text_config
from skipdecode.loop import GenerativeModel
from skipdecode.projections import Weights


@dataclass
class Decoded:
    """What one schedule made of the test set: predictions in its order, and the clock of every batch."""

    schedule: SkipSchedule
    predictions: list[str]
    layers: int = 0  # layers that generated tokens ran as inputs, over all decode steps
    tokens: int = 0  # generated tokens after the first of each row, end tokens included, padding not
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    decode_steps: list[int] = field(default_factory=list)
    cache_bytes: int = 0  # of the largest batch

    @property
    def seconds_per_step(self) -> list[float | None]:
        """For each batch; None where it ended with its first token."""
        return [s / n if n else None for s, n in zip(self.decode_seconds, self.decode_steps, strict=True)]

    @property
    def mean_layers(self) -> float:
        """Layers per decode step of a row that isn't done."""
        return self.layers / self.tokens if self.tokens else float(self.schedule.budget(0))


def encode_test_set(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
) -> list[Prompt]:
    """The prompts of a test set, those with an instruction cut to `max_prompt_tokens` or what the model has room for.

    Raises ConfigError where one without is longer than the model's positions allow.
    """
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    limit = positions - max_new_tokens + 1 if positions is not None else 2**31
    advice = (
        f"the model has {positions} positions and max_new_tokens is {max_new_tokens}: lower it or shorten the prompt"
    )
    return encode_prompts(tokenizer, examples, limit, advice, cut_to=max_prompt_tokens)


def decode_test_set(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    examples: Sequence[Example],
    prompts: Sequence[list[int]],
    schedules: Sequence[SkipSchedule],
    *,
    batch_size: int,
    max_new_tokens: int,
    weights: Weights = "model",
) -> Iterator[list[Decoded]]:
    """Decode `prompts`, the token ids of `examples`, greedily under each schedule.

    Yields the results so far after every batch of prompts.

    Batches hold prompts of like length, padded on the left. In each batch the schedules take turns, in an order that
    rotates, so that a machine whose speed drifts treats them alike. One batch is decoded untimed first.
    """
    order = sorted(range(len(examples)), key=lambda n: len(prompts[n]))
    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    results = [Decoded(schedule, [""] * len(examples)) for schedule in schedules]
    cost = CostModel.of(model)

    def decode(batch: list[int], schedule: SkipSchedule, most: int) -> tuple[list[list[int]], StepClock]:
        return _decode_batch(model, tokenizer, [prompts[n] for n in batch], schedule, most, weights)

    for result in results:
        decode(batches[0], result.schedule, min(8, max_new_tokens))
    for number, batch in enumerate(batches):
        turn = number % len(results)
        for result in [*results[turn:], *results[:turn]]:
            rows, clock = decode(batch, result.schedule, max_new_tokens)
            held = cost.cache_bytes(result.schedule, len(prompts[batch[-1]]), max_new_tokens - 1, len(batch))
            result.cache_bytes = max(result.cache_bytes, held)
            result.prefill_seconds.append(clock.prefill_seconds)
            result.decode_seconds.append(clock.decode_seconds)
            result.decode_steps.append(clock.steps)
            for n, row in zip(batch, rows, strict=True):
                steps = max(0, len(row) - 1)
                result.tokens += steps
                result.layers += sum(result.schedule.budget(i) for i in range(steps))
                text = str(tokenizer.decode(row, skip_special_tokens=True))
                result.predictions[n] = task.restore(examples[n], text)
        yield results


def _decode_batch(
    model: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    schedule: SkipSchedule,
    max_new_tokens: int,
    weights: Weights,
) -> tuple[list[list[int]], StepClock]:
    """Token ids that each prompt was continued with, up to and with the end token, and the clock."""
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(model.device)  # [batch, columns]
    clock = StepClock(model.device)
    output = model.generate(
        **inputs,
        custom_generate=skip_generate,
        schedule=schedule,
        weights=weights,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    assert isinstance(output, torch.Tensor)
    rows: list[list[int]] = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        rows.append(row[:end])
    return rows, clock
