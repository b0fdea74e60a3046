"""Decides which requests are admitted, what runs next of their prompts, and which sequences decode together.

A sequence holds KV slots from its admission to its end. Before it decodes, its prompt runs in chunks: as much in each
step as the limit of prompt tokens permits, so that the sequences that decode never wait longer.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch

from skipdecode.engine.kv_pool import KVPool, Span
from skipdecode.engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from skipdecode.engine.ragged_inputs import nested_groups
from skipdecode.engine.sequence import EngineSequence, GeneratedToken, TokenInput

# With more running sequences than this, lossless ones draft nothing: all the others would wait for the drafts.
MAX_DRAFTING_SEQUENCES = 4
# The compiled kernels compute the attention of so many tokens of a prompt together, counted from its first one. Chunks
# start at multiples, so that a token's result has the same bits as without chunks.
CHUNK_MULTIPLE = 4


class RunningSequence:
    """A sequence that was admitted, and the memory that it holds.

    Attributes:
        row: its row in the engine's batches, and in `Scheduler.starts`.
        starts: its first KV slot in each layer of the model [layers].
        held: the spans that aren't freed yet, with the step from which on they are unused; the next one to free last.
        keys: of its prompt's blocks in the prefix cache.
        computed: how many tokens of its prompt have their keys and values in its slots.
    """

    def __init__(
        self, sequence: EngineSequence, spans: list[Span | None], row: int, starts: torch.Tensor, keys: list[bytes]
    ) -> None:
        self.sequence = sequence
        self.row = row
        self.starts = starts
        self.held = sorted(
            ((cutoff, span) for cutoff, span in zip(sequence.cutoffs, spans, strict=True) if span is not None),
            reverse=True,
        )
        self.keys = keys
        self.computed = 0

    @property
    def decodes(self) -> bool:
        """Whether all of its prompt has run."""
        return self.computed == self.sequence.prompt.shape[1]

    @property
    def prompt_starts(self) -> torch.Tensor:
        """Its first KV slots in the layers that its prompt runs."""
        return self.starts[list(self.sequence.schedule.prompt_layers)]


class PromptChunk(NamedTuple):
    """The tokens of a prompt from `start` to before `end`, which run next.

    The last token of a chunk runs as a prompt's last one does, through all layers, also those above `prompt_stop`. If
    the prompt goes on, it therefore runs once more, as the first token of the next chunk.
    """

    running: RunningSequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with it."""
        return self.end == self.running.sequence.prompt.shape[1]

    @property
    def computed(self) -> int:
        """How many tokens of the prompt have their keys and values afterwards."""
        return self.end if self.is_last else self.end - 1


class Scheduler:
    """The waiting and the running sequences of an engine. Only the engine's thread calls it, except for `waiting`.

    Args:
        prefixes: keys and values of earlier prompts.
        lock: held while `waiting` changes, as other threads append to it.
        max_running: maximum number of sequences in `running`.
        depth: number of layers of the model.
        wave_rows, wave_seconds, wave_tokens: as in `Engine`.

    Attributes:
        waiting: sequences to be admitted, the first one next.
        running: sequences that decode, or whose prompts run.
        starts: the first KV slots of running sequences, int32 [rows, layers of the model].
        ended: number of sequences that have ended, the cancelled and failed ones included.
        prefix_tokens: number of prompt tokens whose keys and values came from the prefix cache.
    """

    def __init__(
        self,
        pool: KVPool,
        prefixes: PrefixCache,
        lock: threading.Condition,
        max_running: int,
        depth: int,
        wave_rows: int,
        wave_seconds: float,
        wave_tokens: int,
    ) -> None:
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[RunningSequence] = []
        self.starts = torch.zeros(max_running, depth, dtype=torch.int32)
        self.ended = self.prefix_tokens = 0
        self._pool = pool
        self._prefixes = prefixes
        self._lock = lock
        self._free_rows = list(reversed(range(max_running)))
        self._wave_rows, self._wave_seconds, self._wave_tokens = min(wave_rows, max_running), wave_seconds, wave_tokens

    def remove_cancelled(self) -> None:
        """End the sequences whose requests were cancelled."""
        with self._lock:
            cancelled = [sequence for sequence in self.waiting if sequence.answer.cancelled]
            if cancelled:
                self.waiting = deque(sequence for sequence in self.waiting if sequence not in cancelled)
        for sequence in cancelled:
            self.ended += 1
            sequence.answer.add(GeneratedToken(-1, end="cancelled"))
        for running in [running for running in self.running if running.sequence.answer.cancelled]:
            self.remove(running)
            running.sequence.answer.add(GeneratedToken(-1, end="cancelled"))

    def schedule_prompts(self) -> list[list[PromptChunk]]:
        """The chunks of prompts that run before the next decode step, in groups that run the same layers.

        Prompts that have begun come first, then waiting ones as far as memory permits, in their order. A prompt that
        goes on as another one does in this step waits for the keys and values of that one.
        """
        tokens, begun = self._wave_tokens, set[bytes]()
        groups: dict[tuple[tuple[int, ...], int | None], list[PromptChunk]] = {}
        for running in chain([running for running in self.running if not running.decodes], self._admit()):
            self._restore(running)
            block = running.computed // BLOCK_TOKENS
            if not begun.isdisjoint(running.keys[block : block + 1]):
                continue
            chunk = self._chunk(running, tokens)
            if chunk is not None:
                schedule = running.sequence.schedule
                groups.setdefault((schedule.prompt_layers, schedule.prompt_stop), []).append(chunk)
                begun.update(running.keys[block : -(-chunk.computed // BLOCK_TOKENS)])
                tokens -= chunk.end - chunk.start
            if chunk is None or tokens <= 0:
                break
        return list(groups.values())

    def _chunk(self, running: RunningSequence, tokens: int) -> PromptChunk | None:
        """The next chunk of a prompt, of at most so many tokens; None if that is too few to get on."""
        start, length = running.computed, running.sequence.prompt.shape[1]
        end = start + tokens
        if end >= length:
            return PromptChunk(running, start, length)
        end = (end - 1) // CHUNK_MULTIPLE * CHUNK_MULTIPLE + 1
        return PromptChunk(running, start, end) if end > start + 1 else None

    def _restore(self, running: RunningSequence) -> None:
        """Copy from the prefix cache what it holds of the rest of a prompt."""
        first = running.computed // BLOCK_TOKENS
        blocks = self._prefixes.blocks(running.keys, first)
        if blocks:
            self._pool.write(running.prompt_starts, first * BLOCK_TOKENS, torch.cat(blocks, dim=3))
            computed = (first + len(blocks)) * BLOCK_TOKENS
            self.prefix_tokens += computed - running.computed
            running.computed = computed

    def finish(self, chunk: PromptChunk) -> None:
        """Note that a chunk has run, and keep its whole blocks in the prefix cache."""
        running, blocks = chunk.running, []
        first, end = running.computed // BLOCK_TOKENS, min(chunk.computed // BLOCK_TOKENS, len(running.keys))
        running.computed = chunk.computed
        if first < end:
            kept = self._pool.read(running.prompt_starts, first * BLOCK_TOKENS, (end - first) * BLOCK_TOKENS)
            blocks = [block.clone() for block in kept.split(BLOCK_TOKENS, dim=3)]  # each can be dropped by itself
            self._prefixes.add(running.keys, first, blocks)

    def _admit(self) -> Iterator[RunningSequence]:
        """Admit a wave of waiting sequences, in their order, as far as memory permits, each when it is asked for."""
        waiting = len(self.waiting)
        if not waiting or not self._free_rows:
            return
        waited = time.monotonic() - self.waiting[0].answer.times.submitted
        wave_is_full = min(waiting, len(self._free_rows)) >= self._wave_rows
        if self.running and not wave_is_full and waited < self._wave_seconds:
            return
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            counts = sequence.slots
            allocated = self._pool.allocate([count for count in counts if count])
            if allocated is None:
                return
            sequence.answer.times.admitted = time.monotonic()
            row, unassigned, schedule = self._free_rows.pop(), iter(allocated), sequence.schedule
            spans = [next(unassigned) if count else None for count in counts]
            self.starts[row] = torch.tensor([span.start if span is not None else 0 for span in spans])
            keys = self._prefixes.keys(sequence.prompt[0].tolist(), schedule.prompt_layers, schedule.prompt_stop)
            running = RunningSequence(sequence, spans, row, self.starts[row], keys)
            with self._lock:  # whoever waits for all requests to end must see it in one of the two
                self.waiting.popleft()
                self.running.append(running)
            yield running

    def schedule(self) -> list[list[tuple[RunningSequence, TokenInput]]]:
        """The inputs of the next step, in groups within which the sets of layers are nested, largest set first."""
        decoding = [running for running in self.running if running.decodes]
        drafting = len(decoding) <= MAX_DRAFTING_SEQUENCES
        inputs = [(running, token) for running in decoding for token in running.sequence.next_inputs(drafting=drafting)]
        return [[inputs[n] for n in group] for group in nested_groups([token.layers for _, token in inputs])]

    def free_unused(self, running: RunningSequence) -> None:
        """Free the KV slots in layers that no later token of a sequence runs."""
        while running.held and running.held[-1][0] <= running.sequence.step:
            self._pool.free(running.held.pop()[1])

    def remove(self, running: RunningSequence) -> None:
        """Remove a sequence that has ended, and free what it holds."""
        self.running.remove(running)
        for _, span in running.held:
            self._pool.free(span)
        running.held.clear()
        self._free_rows.append(running.row)
        self.ended += 1
