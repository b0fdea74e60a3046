"""Decode a test set with several systems, which take turns on each batch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data import Example, Task
from data.batches import Prompt, encode_prompts
from eval.journal import Journal, Key
from eval.processes import ALONE, Processes
from eval.systems.base import Checkpoint, DecodedBatch, SkipSystem, System
from skipdecode import SkipSchedule
from skipdecode.families import longest_sequence
from skipdecode.schedule.schedule import Over
from skipdecode.timing.interleave import Ratio, order_of_turn

WARM_UP_TOKENS = 8


@dataclass
class DecodedSet:
    """The results of one system on a test set so far: outputs and their lengths in its order, and every batch."""

    system: System
    predictions: list[str]
    lengths: list[int]
    turns: list[DecodedBatch] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Generated tokens after the first of each sequence, including end tokens, without padding."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def steps(self) -> int:
        """The number of decode steps of all batches."""
        return sum(turn.steps for turn in self.turns)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of all batches up to their first tokens."""
        return sum(turn.prefill_seconds for turn in self.turns)

    @property
    def decode_seconds(self) -> float:
        """Seconds of all batches after their first tokens."""
        return sum(turn.decode_seconds for turn in self.turns)

    @property
    def mean_layers(self) -> float:
        """Mean layers per generated token."""
        return sum(turn.layers for turn in self.turns) / self.tokens if self.tokens else self._first_budget

    @property
    def layers_per_step(self) -> float:
        """Mean layers of a batch per decode step, which are those of its deepest sequence."""
        return sum(turn.batch_layers for turn in self.turns) / self.steps if self.steps else self._first_budget

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """The fraction of drafted tokens that were accepted; None without drafts."""
        drafted = sum(turn.drafted for turn in self.turns)
        return sum(turn.accepted for turn in self.turns) / drafted if drafted else None

    @property
    def tokens_per_verification(self) -> float | None:
        """Tokens of all sequences of a batch per full-depth pass; None without drafts."""
        verifications = sum(turn.verifications for turn in self.turns)
        return self.tokens / verifications if verifications else None

    @property
    def cache_bytes(self) -> int:
        """KV cache of the largest batch."""
        return max((turn.cache_bytes for turn in self.turns), default=0)

    @property
    def agreement(self) -> list[tuple[int, int]]:
        """For each output position, the tokens equal to full depth's choice, and all tokens; empty if not requested."""
        agreeing = [turn.agreeing for turn in self.turns if turn.agreeing is not None]
        return [
            (sum(counts), sum(length > n for length in self.lengths))
            for n, counts in enumerate(zip_longest(*agreeing, fillvalue=0))
        ]

    def bound_over(self, slower: "DecodedSet") -> float | None:
        """Bytes that a slower system must read, divided by those of this one; None where they aren't known."""
        theirs, ours = (sum(turn.read_bytes for turn in each.turns) for each in (slower, self))
        return theirs / ours if ours else None

    def speed_over(self, slower: "DecodedSet", over: Over) -> Ratio:
        """The speedup over a slower system that took turns with it on sequences of equal length, over the batches.

        With `over="decode"`, batches that ended with their first tokens are left out.
        """
        pairs = [
            (theirs.seconds(over), ours.seconds(over))
            for theirs, ours in zip(slower.turns, self.turns, strict=True)
            if over == "all" or ours.steps
        ]
        return Ratio.of(*zip(*pairs, strict=True)) if pairs else Ratio(1.0, 1.0, 1.0)

    @property
    def _first_budget(self) -> float:
        return float(self.system.cached.budget(0))


def encode_test_set(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
) -> list[Prompt]:
    """Encode the prompts of a test set.

    Prompts with an instruction are truncated to `max_prompt_tokens` or the model's positions. Raises ConfigError
    where a prompt without an instruction exceeds the model's positions.
    """
    positions = longest_sequence(model.config)
    limit = positions - max_new_tokens + 1 if positions is not None else 2**31
    advice = (
        f"the model has {positions} positions and max_new_tokens is {max_new_tokens}: lower it or shorten the prompt"
    )
    return encode_prompts(tokenizer, examples, limit, advice, cut_to=max_prompt_tokens)


def decode_test_set(
    checkpoint: Checkpoint,
    task: Task,
    examples: Sequence[Example],
    prompts: Sequence[list[int]],
    schedules: Sequence[SkipSchedule],
    *,
    batch_size: int,
    max_new_tokens: int,
) -> Iterator[list[DecodedSet]]:
    """Decode `prompts`, the token ids of `examples`, under each schedule in turns (`take_turns`).

    Results are in the order of the schedules.
    """
    systems = [SkipSystem(str(number), checkpoint, schedule) for number, schedule in enumerate(schedules)]
    yield from take_turns(
        systems, task, examples, prompts, batch_size=batch_size, max_new_tokens=max_new_tokens, journal=Journal()
    )


def batch_count(prompts: int, batch_size: int) -> int:
    """The number of batches of a set of prompts."""
    return -(-prompts // batch_size)


def batches_of_like_length(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """The indices of the prompts in each batch, after sorting by length."""
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def spread_over_lengths(lengths: Sequence[int], count: int) -> list[int]:
    """The indices of `count` prompts spread evenly over all, in order of length; all indices where there are fewer.

    >>> spread_over_lengths([4, 1, 2, 3, 9, 5], 3)
    [2, 0, 4]
    """
    order = sorted(range(len(lengths)), key=lambda n: lengths[n])
    count = min(count, len(order))
    return [order[(2 * n + 1) * len(order) // (2 * count)] for n in range(count)]


def take_turns(
    systems: Sequence[System],
    task: Task,
    examples: Sequence[Example],
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    journal: Journal,
    stage: str = "test",
    lengths: Sequence[int] | None = None,
    first_turn: int = 0,
    agreement: bool = False,
    processes: Processes = ALONE,
) -> Iterator[list[DecodedSet]]:
    """Decode `prompts`, the token ids of `examples`, greedily by each system.

    Yields the results so far after every batch of prompts. Batches that `journal` holds for this `stage` aren't decoded
    again; new ones are added to it.

    Sequences end at their end token; with `lengths`, after that many tokens. With `agreement`, outputs are compared
    with full depth's choices.

    Batches hold prompts of similar length, padded on the left. The systems take turns on each batch (`order_of_turn`,
    starting at `first_turn`). Each system decodes a few untimed tokens first.

    Several processes decode one batch each and then exchange results: all yield the same, and `journal` must have the
    same content on all of them.
    """
    results = [DecodedSet(system, [""] * len(examples), [0] * len(examples)) for system in systems]
    warm: set[str] = set()
    batches = batches_of_like_length(prompts, batch_size)

    def key_of(number: int, system: System) -> Key:
        return (stage, str(batch_size), str(number), system.label)

    def decode(number: int) -> list[tuple[Key, Any]]:
        """Decode a batch with the systems that the journal lacks. Returns the new entries."""
        ids = [prompts[n] for n in batches[number]]
        ends = None if lengths is None else [lengths[n] for n in batches[number]]
        added = []
        for system in order_of_turn(systems, first_turn + number):
            key = key_of(number, system)
            if key in journal:
                continue
            if system.label not in warm:
                system.decode(ids, min(WARM_UP_TOKENS, max_new_tokens))
                warm.add(system.label)
            journal.add(key, asdict(system.decode(ids, max_new_tokens, ends, agreement=agreement)))
            added.append((key, journal[key]))
        return added

    for start in range(0, len(batches), processes.sharers):
        round_ = range(start, min(start + processes.sharers, len(batches)))
        mine = start + processes.share
        added = decode(mine) if mine in round_ else []
        for others in processes.gather(added):
            journal.merge(others)
        for number in round_:
            for result in results:
                turn = DecodedBatch(**journal[key_of(number, result.system)])
                result.turns.append(turn)
                for n, text, length in zip(batches[number], turn.texts, turn.lengths, strict=True):
                    result.predictions[n] = task.restore(examples[n], text)
                    result.lengths[n] = length
            yield results
