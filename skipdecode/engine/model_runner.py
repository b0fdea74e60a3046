"""Runs the passes of an engine: chunks of prompts, and decode steps."""

from collections.abc import Sequence

import torch

from skipdecode.engine.chunk_inputs import ChunkInputs
from skipdecode.engine.gpu_passes import GpuPasses
from skipdecode.engine.kv_pool import KVPool, PoolCache
from skipdecode.engine.ragged_inputs import PositionTables, RaggedInputs, prefix_lengths
from skipdecode.engine.scheduler import PromptChunk, RunningSequence
from skipdecode.engine.sequence import TokenInput
from skipdecode.fastpath.model import FastDecoder


class ModelRunner:
    """A model whose sequences have their keys and values in a pool.

    Args:
        starts: where running sequences begin in the pool, as `Scheduler.starts`.
    """

    def __init__(self, decoder: FastDecoder, pool: KVPool, starts: torch.Tensor) -> None:
        self._decoder = decoder
        self._pool = pool
        self._starts = starts
        self._device = pool.keys.device
        self._cache = PoolCache(pool, len(decoder.layers))
        self._tables = PositionTables(decoder, self._device)
        self._on_gpu = GpuPasses.where_supported(decoder, pool, self._cache, self._tables)
        self._chunk_inputs = ChunkInputs if self._on_gpu is None else self._on_gpu.chunk_inputs

    def prefill(self, chunks: Sequence[PromptChunk]) -> torch.Tensor:
        """Run chunks of prompts that run the same layers; returns logits of their last tokens [chunks, vocabulary]."""
        schedule = chunks[0].running.sequence.schedule
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        self._tables.grow(max(positions) + 1)
        inputs = self._chunk_inputs(
            self._pool,
            self._starts[[chunk.running.row for chunk in chunks]],
            [chunk.start for chunk in chunks],
            [chunk.end - chunk.start for chunk in chunks],
            schedule.prompt_layers,
            *self._tables.at(torch.tensor(positions, device=self._device)),
        )
        tokens = torch.cat([chunk.running.sequence.prompt[0, chunk.start : chunk.end] for chunk in chunks])
        return self._decoder.run_prompt(tokens, schedule.prompt_layers, self._cache, inputs, schedule.prompt_stop)

    def decode(self, group: Sequence[tuple[RunningSequence, TokenInput]]) -> torch.Tensor:
        """Run tokens whose sets of layers are nested, largest set first. Returns logits [tokens, vocabulary]."""
        layer_sets = [token.layers for _, token in group]
        positions = [token.position for _, token in group]
        rows = [running.row for running, _ in group]
        self._tables.grow(max(positions) + 1)
        layers, counts = layer_sets[0], prefix_lengths(layer_sets)
        ids, starts = [token.token for _, token in group], self._starts[rows]
        if self._on_gpu is not None:
            drafts = len(set(rows)) < len(rows)
            return self._on_gpu.decode(ids, positions, starts, layers, counts, drafts=drafts)
        tokens, at = (torch.tensor(each, device=self._device) for each in (ids, positions))
        inputs = RaggedInputs(self._pool, starts, positions, rows, layers, counts, *self._tables.at(at))
        logits: torch.Tensor = self._decoder(tokens, layers, self._cache, inputs)  # type: ignore[arg-type]
        return logits
