"""Greedy decoding by llama.cpp, a batch of prompts at a time."""

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

_CELLS = 256  # llama.cpp rounds a sequence's part of the cache up to so many columns
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


@dataclass(frozen=True)
class Continued:
    """What prompts were continued by, and the seconds that it took.

    Attributes:
        tokens: [batch, new tokens].
        prefill_seconds: until the first new token was chosen.
        decode_seconds: from there to the last.
    """

    tokens: list[list[int]]
    prefill_seconds: float
    decode_seconds: float


class GreedyLlama:
    """A GGUF file, loaded to be decoded with so many threads. Raises ConfigError where llama.cpp can't read it."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp  # here: of an extra

        self._lib = llama_cpp
        # It says a hundred lines about each model. The package's own filter takes its levels for others.
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
        """Continue prompts of one length by so many tokens, each row a sequence of its own."""
        rows, columns = len(ids), len(ids[0])
        self._make_context(rows, columns + new_tokens)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        batch = self._lib.llama_batch_init(rows * columns, 0, 1)
        try:
            start = time.perf_counter()
            chosen = [self._decode(batch, np.array(ids, np.int32), 0)]
            first = time.perf_counter()
            for step in range(new_tokens - 1):
                chosen.append(self._decode(batch, chosen[-1][:, None], columns + step))
            end = time.perf_counter()
        finally:
            self._lib.llama_batch_free(batch)
        return Continued(np.stack(chosen, axis=1).tolist(), first - start, end - first)

    def _make_context(self, rows: int, columns: int) -> None:
        """Have a cache for so many rows and columns, the last one if it is as large."""
        columns = -(-columns // _CELLS) * _CELLS
        if self._made_for == (rows, columns):
            return
        if self._context is not None:
            self._lib.llama_free(self._context)
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = rows * columns
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = self._threads
        self._context = self._lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ConfigError(f"llama.cpp can't make a cache for {rows} rows of {columns} columns")
        self._made_for = (rows, columns)

    def _decode(self, batch: "llama_cpp.llama_batch", tokens: np.ndarray, position: int) -> np.ndarray:
        """Put tokens [rows, columns] through the model from a position on. Returns what it chooses next, [rows]."""
        rows, columns = tokens.shape
        count = batch.n_tokens = rows * columns

        def fill(field: object, values: np.ndarray) -> None:
            np.ctypeslib.as_array(field, (count,))[:] = values

        fill(batch.token, tokens.ravel())
        fill(batch.pos, np.tile(np.arange(position, position + columns), rows))
        fill(batch.n_seq_id, np.ones(count))
        last = np.arange(count) % columns == columns - 1
        fill(batch.logits, last)
        for index in range(count):
            batch.seq_id[index][0] = index // columns
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {status} for {rows} rows of {columns} columns")
        logits = [self._lib.llama_get_logits_ith(self._context, int(index)) for index in np.flatnonzero(last)]
        best = [np.ctypeslib.as_array(row, (self._vocabulary,)).argmax() for row in logits]
        return np.array(best, np.int32)


def _say_errors(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))
