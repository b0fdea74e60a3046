"""Batched greedy decoding with llama.cpp."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from skipdecode import ConfigError

if TYPE_CHECKING:
    import llama_cpp

_CELLS = 256  # llama.cpp rounds the KV cache of a sequence up to a multiple of this many positions
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


@dataclass(frozen=True)
class Continued:
    """The tokens generated for a batch of prompts, and the time.

    Attributes:
        tokens: [batch, new tokens].
        prefill_seconds: until the first new token was chosen.
        decode_seconds: from the first new token to the last.
    """

    tokens: list[list[int]]
    prefill_seconds: float
    decode_seconds: float


class GreedyLlama:
    """A model loaded from a GGUF file. Raises ConfigError where llama.cpp can't read it."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp  # an optional dependency

        self._lib = llama_cpp
        # llama.cpp logs a hundred lines for each model, and the package's own filter misreads the log levels.
        self._log = llama_cpp.llama_log_callback(_say_errors)
        self._lib.llama_log_set(self._log, None)
        self._lib.llama_backend_init()
        parameters = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ConfigError(f"llama.cpp can't load {path}")
        self._vocabulary = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._threads = threads
        self._context: llama_cpp.llama_context_p | None = None
        self._made_for = (0, 0)

    def run(self, ids: Sequence[list[int]], new_tokens: int) -> Continued:
        """Generate `new_tokens` tokens for each of the prompts `ids`, which have equal lengths."""
        rows, length = len(ids), len(ids[0])
        self._make_context(rows, length + new_tokens)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        batch = self._lib.llama_batch_init(rows * length, 0, 1)
        try:
            start = time.perf_counter()
            chosen = [self._decode(batch, np.array(ids, np.int32), 0)]
            first = time.perf_counter()
            for step in range(new_tokens - 1):
                chosen.append(self._decode(batch, chosen[-1][:, None], length + step))
            end = time.perf_counter()
        finally:
            self._lib.llama_batch_free(batch)
        return Continued(np.stack(chosen, axis=1).tolist(), first - start, end - first)

    def _make_context(self, rows: int, positions: int) -> None:
        """Create a KV cache for this many sequences and positions, unless the last one has that size."""
        positions = -(-positions // _CELLS) * _CELLS
        if self._made_for == (rows, positions):
            return
        if self._context is not None:
            self._lib.llama_free(self._context)
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = rows * positions
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = self._threads
        self._context = self._lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ConfigError(f"llama.cpp can't allocate a KV cache for {rows} sequences of {positions} positions")
        self._made_for = (rows, positions)

    def _decode(self, batch: "llama_cpp.llama_batch", tokens: np.ndarray, position: int) -> np.ndarray:
        """Run tokens [rows, positions] from a position on. Returns the most likely next token of each row, [rows]."""
        rows, length = tokens.shape
        count = batch.n_tokens = rows * length

        def fill(field: object, values: np.ndarray) -> None:
            np.ctypeslib.as_array(field, (count,))[:] = values

        fill(batch.token, tokens.ravel())
        fill(batch.pos, np.tile(np.arange(position, position + length), rows))
        fill(batch.n_seq_id, np.ones(count))
        last = np.arange(count) % length == length - 1
        fill(batch.logits, last)
        for index in range(count):
            batch.seq_id[index][0] = index // length
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status} for {rows} sequences of {length} tokens")
        logits = [self._lib.llama_get_logits_ith(self._context, int(index)) for index in np.flatnonzero(last)]
        best = [np.ctypeslib.as_array(row, (self._vocabulary,)).argmax() for row in logits]
        return np.array(best, np.int32)


def _say_errors(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))
