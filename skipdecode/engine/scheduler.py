"""Decides which requests are admitted, which sequences run together in a step, and when their KV slots are freed."""

import threading
import time
from collections import deque
from collections.abc import Iterator

from skipdecode.engine.kv_pool import KVPool, Span
from skipdecode.engine.ragged_inputs import nested_groups
from skipdecode.engine.sequence import EngineSequence, GeneratedToken, TokenInput

# With more running sequences than this, lossless ones draft nothing: all the others would wait for the drafts.
MAX_DRAFTING_SEQUENCES = 4


class RunningSequence:
    """A sequence that was admitted, and the memory that it holds.

    Attributes:
        spans: KV slots in each layer; None in a layer that no new token runs.
        row: its row in the engine's table of spans.
        held: the spans that aren't freed yet, with the step from which on they are unused; the next one to free last.
    """

    def __init__(self, sequence: EngineSequence, spans: list[Span | None], row: int) -> None:
        self.sequence = sequence
        self.spans = spans
        self.row = row
        self.held = sorted(
            ((cutoff, span) for cutoff, span in zip(sequence.cutoffs, spans, strict=True) if span is not None),
            reverse=True,
        )


class Scheduler:
    """The waiting and the running sequences of an engine. Only the engine's thread calls it, except for `waiting`.

    Args:
        lock: held while `waiting` changes, as other threads append to it.
        wave_rows, wave_seconds, wave_tokens: as in `Engine`.

    Attributes:
        waiting: sequences to be admitted, the first one next.
        running: sequences that decode.
        ended: number of sequences that have ended, the cancelled and failed ones included.
    """

    def __init__(
        self,
        pool: KVPool,
        lock: threading.Condition,
        max_running: int,
        wave_rows: int,
        wave_seconds: float,
        wave_tokens: int,
    ) -> None:
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[RunningSequence] = []
        self.ended = 0
        self._pool = pool
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

    def admit(self) -> Iterator[RunningSequence]:
        """Admit a wave of waiting sequences, in their order, as far as memory permits.

        Each is admitted when the iterator is asked for it, so that one which ends with its first token makes room for
        the next.
        """
        waiting = len(self.waiting)
        if not waiting or not self._free_rows:
            return
        waited = time.monotonic() - self.waiting[0].answer.times.submitted
        wave_is_full = min(waiting, len(self._free_rows)) >= self._wave_rows
        if self.running and not wave_is_full and waited < self._wave_seconds:
            return
        tokens = self._wave_tokens
        while self.waiting and self._free_rows and tokens > 0:
            sequence = self.waiting[0]
            counts = sequence.slots
            allocated = self._pool.allocate([count for count in counts if count])
            if allocated is None:
                return
            with self._lock:
                self.waiting.popleft()
            spans = iter(allocated)
            running = RunningSequence(
                sequence, [next(spans) if count else None for count in counts], self._free_rows.pop()
            )
            self.running.append(running)
            tokens -= sequence.prompt.shape[1]
            yield running

    def schedule(self) -> list[list[tuple[RunningSequence, TokenInput]]]:
        """The inputs of the next step, in groups within which the sets of layers are nested, largest set first."""
        drafting = len(self.running) <= MAX_DRAFTING_SEQUENCES
        inputs = [
            (running, token) for running in self.running for token in running.sequence.next_inputs(drafting=drafting)
        ]
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
