"""The inputs of a decode step besides its tokens: positions, KV slots, and what each token may attend to.

A KV slot is a place along the cache's sequence dimension. Prompts are padded on the left, so that all sequences of a
batch write generated token i to the same slot, whatever the lengths of their prompts.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skipdecode.fastpath.kv_cache import PlannedLayer


class StepInputs:
    """The inputs of one token of each sequence of a batch.

    A layer (`skipdecode.fastpath.layer.FastLayer`) uses them in this order: it calls `store` with keys and values,
    `lay_out` with queries, `mask`, and `take_back` with the result of attention. Subclasses serve tokens that are
    placed otherwise: prompts, drafts that are verified, CUDA graphs, and the sequences of an engine.

    Attributes:
        slot: the KV slot of the tokens; where they have several, the last one.
        position_ids: [batch], for a model that looks positions up in a table.
        rotary: cosines and signed sines [batch or 1, 1, rotated dimensions], for a model with rotary embeddings.
        bias: added to attention scores [batch or 1, 1 or heads, 1, slots]; None where no slot is padding.
        many_queries: whether every position of a prompt has a query.
        attends: whether attention is `attend`, by a kernel for a GPU, in place of these four.
        in_buffers: whether the slot is a value in the memory of a GPU, which the compiled CPU kernels can't read.
    """

    __slots__ = ("bias", "position_ids", "rotary", "slot")
    many_queries = False
    attends = False
    in_buffers = False

    def __init__(
        self,
        slot: int,
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        self.slot = slot
        self.position_ids = position_ids
        self.rotary = rotary
        self.bias = bias

    def rows(self, index: int) -> int | None:
        """How many rows run layer `index`, which are the first ones; None for all."""
        return None

    def of_layer(self, index: int) -> "StepInputs":
        """The inputs of the rows that run layer `index`."""
        return self

    def store(
        self, cached: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens' keys and values [rows, kv_heads, head_dim] into the cache.

        Returns all keys and values that the tokens attend to, [batch, kv_heads, slots, head_dim].
        """
        keys: Any = cached.keys
        values: Any = cached.values
        end = self.slot + 1
        keys[:, :, self.slot] = key
        values[:, :, self.slot] = value
        cached.length = end
        start = 0 if window is None else max(0, end - window)
        return keys[:, :, start:end], values[:, :, start:end]

    def lay_out(self, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Queries [rows, heads, head_dim] as attention takes them: [batch, kv_heads, queries, head_dim].

        Heads that share keys become several queries of the same position, so that no key or value is repeated.
        """
        return query.view(len(query), kv_heads, -1, query.shape[-1])

    def mask(self, query: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """The values added to the scores of queries from `lay_out` with keys from `store`; None for none."""
        end = self.slot + 1
        return self.bias[..., end - keys.shape[2] : end] if self.bias is not None else None

    def take_back(self, attended: torch.Tensor) -> torch.Tensor:
        """The result of attention, of the shape that `lay_out` gave: [rows, heads * head_dim]."""
        return attended.reshape(len(attended), -1)

    def attend(
        self,
        layer: Any,
        cached: PlannedLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Write keys and values into the cache and attend to it, by kernels: [rows, heads * head_dim].

        Args:
            layer: the `skipdecode.fastpath.layer.FastLayer` that runs.
            query, key, value: [rows, heads, head_dim].
            rotary: as in the attribute, by which queries and keys are still to be rotated.
        """
        raise NotImplementedError

    def rows_and_slots(self, tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """For each token its row in the cache and its KV slot, as the compiled kernels take them."""
        return range(tokens), [self.slot] * tokens

    def nested_rows(self, layers: Sequence[int]) -> "tuple[array[int], torch.Tensor] | None":
        """For each of `layers` how many of the first tokens run it, and their rows in the cache [layers, tokens].

        None where all tokens run all layers, in the rows that `rows_and_slots` returns.
        """
        return None


@dataclass(eq=False)
class PreparedInputs:
    """The inputs of all decode steps after a prompt: a function from a step's number to its StepInputs.

    Attributes:
        prompt_columns: the padded length of the prompt, in tokens.
        position_ids: as in StepInputs, of every step [steps, batch].
        rotary: as in StepInputs, of every step [batch or 1, steps, 1, rotated dimensions].
        bias: as in StepInputs, of all slots.
    """

    prompt_columns: int
    position_ids: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    bias: torch.Tensor | None

    def __call__(self, i: int) -> StepInputs:
        position_ids = self.position_ids[i] if self.position_ids is not None else None
        rotary = (self.rotary[0][:, i], self.rotary[1][:, i]) if self.rotary is not None else None
        return StepInputs(self.prompt_columns + i, position_ids, rotary, self.bias)

    def of_tokens(
        self, rows: list[int], steps: list[int]
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """Position ids [tokens] and rotary [tokens, 1, rotated dimensions] of tokens, each with its row and step."""
        position_ids = self.position_ids[steps, rows] if self.position_ids is not None else None
        if self.rotary is None:
            return position_ids, None
        rows = rows if len(self.rotary[0]) > 1 else [0] * len(rows)
        return position_ids, (self.rotary[0][rows, steps], self.rotary[1][rows, steps])

    def of_sequences(
        self, rows: Sequence[int], starts: Sequence[int], steps: int
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """The inputs of several steps of sequences, given by their rows in the batch and their first steps.

        Returns position ids [steps, sequences] and rotary [steps, sequences or 1, 1, rotated dimensions].
        """
        together = len(set(starts)) == 1

        def look_up(table: torch.Tensor) -> torch.Tensor:  # [steps, batch or 1, ...]; the last step bounds all
            batch = table.shape[1]
            if together and (batch == 1 or list(rows) == list(range(batch))):
                return table[starts[0] : starts[0] + steps]
            numbers = torch.tensor(starts) + torch.arange(steps)[:, None]
            return table[numbers.clamp(max=len(table) - 1), torch.tensor(rows) if batch > 1 else 0]

        position_ids = look_up(self.position_ids) if self.position_ids is not None else None
        if self.rotary is None:
            return position_ids, None
        cos, sin = (look_up(part.transpose(0, 1)) for part in self.rotary)
        return position_ids, (cos, sin)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows` of the batch from now on, in their order."""
        kept = list(rows)
        if self.position_ids is not None:
            self.position_ids = self.position_ids[:, kept]
        if self.rotary is not None and len(self.rotary[0]) > 1:
            self.rotary = (self.rotary[0][kept], self.rotary[1][kept])
        if self.bias is not None and len(self.bias) > 1:
            self.bias = self.bias[kept]


def attention_mask(
    distance: torch.Tensor, window: int | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The values added to attention scores: -inf where a query may not attend to a key, else the bias.

    Args:
        distance: the slot of each query minus that of each key [..., queries, keys]; a query attends to those from 0.
        window: a sliding window's size in slots, the query's own included; None for all earlier slots.
        bias: of padding and ALiBi, broadcast against `distance`; None for 0.
    """
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    return torch.where(seen, 0.0 if bias is None else bias, float("-inf")).to(dtype)
