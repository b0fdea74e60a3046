"""Prompts and decode steps without a model's forward pass: nothing is computed that decoding doesn't need.

A forward pass of transformers is made for any length and any cache. One step of decoding is a special case: one token
a row, all active layers holding the same columns (law 1), so masks, positions and layer lists are known before the
first step. What is left is a dozen operations a layer, done here on [batch, hidden]. A prompt goes through the same
operations, its tokens as rows. The names of the weights are a family's only contribution (`skipdecode.families`);
models that aren't made of plain parts (adapters, hooks, other libraries' quantisation) are left to their own forward
pass.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from skipdecode.families import FAMILIES, decoder_layers, text_config
from skipdecode.fastpath.cpu_steps import NativeSteps, native_steps
from skipdecode.fastpath.kv_cache import PlannedCache
from skipdecode.fastpath.layer import FastLayer, Norm
from skipdecode.fastpath.prompt_inputs import PromptInputs
from skipdecode.fastpath.step_inputs import PreparedInputs, StepInputs
from skipdecode.fastpath.support import parts_of
from skipdecode.kernels.linear import HEAD_MAKERS, MAKERS, Linear, Weights


class FastDecoder:
    """A model's prefill and decode steps. Holds its parts and not the model itself, so that the model can be freed.

    Args:
        model: a model for which `FastPath.why_not` has no reason.
        weights: "model" computes with the model's own weights, "packed" with copies in the layout that the processor
            reads fastest, "int8" and "int4" with copies in so many bits, the two others with those of the LM head in
            more or in fewer. Copies are of all projections, the LM head among them; all need a CPU, and 4 bits the
            compiled kernels (`skipdecode.kernels.cpu`).
        layers: those that it can run, the first one among them; None for all.
        before: an earlier decoder of the same model and weights, whose copies are taken over.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Weights = "model",
        layers: Collection[int] | None = None,
        before: "FastDecoder | None" = None,
    ) -> None:
        parts = parts_of(model)
        assert parts is not None
        config = text_config(model.config)
        body: Any = model.get_submodule(FAMILIES[model.config.model_type].layers.rpartition(".")[0])
        make_linear = MAKERS[weights]
        self.weights = weights
        self.dtype = model.dtype
        # Shape -> `skipdecode.fastpath.cuda_graphs.StepGraphs`, the longest unused first; they are freed with the
        # decoder.
        self.kept_graphs: OrderedDict[Any, Any] = OrderedDict()
        modules = decoder_layers(model)
        self.layers: list[Any] = [None] * len(modules) if before is None else list(before.layers)
        for n in range(len(modules)) if layers is None else layers:
            self.layers[n] = self.layers[n] or FastLayer(modules[n], parts, config, make_linear)
        self.windowed = any(block.window is not None for block in self.layers if block is not None)
        self._positions = parts.positions
        self.heads = config.num_attention_heads
        self._embedding: Any = model.get_input_embeddings()
        self._embedding_norm = Norm(getattr(body, parts.embedding_norm)) if parts.embedding_norm else None
        self._position_table = getattr(body, parts.position_table).weight if parts.position_table else None
        self._position_offset = parts.position_offset
        self._rotary: Any = getattr(body, "rotary_emb", None)
        self._project_in: Any = getattr(body, "project_in", None)  # opt-350m
        self._project_out: Any = getattr(body, "project_out", None)
        norm = getattr(body, parts.final_norm)  # opt-350m has none
        self._final_norm = Norm(norm) if norm is not None else None
        head: Any = model.get_output_embeddings()
        self.head: Linear = HEAD_MAKERS[weights](head) if before is None else before.head
        plain_start = (
            type(self._embedding) is nn.Embedding
            and self._embedding.max_norm is None
            and self._embedding_norm is None
            and self._project_in is None
        )
        self._native = native_steps(
            self.layers,
            self._final_norm,
            (self.head, head) if self._project_out is None else None,
            (cast(torch.Tensor, self._embedding.weight), self._position_table) if plain_start else None,
            weights,
        )

    def step_inputs(
        self, attention_mask: torch.Tensor, steps: int, position_ids: torch.Tensor | None = None
    ) -> PreparedInputs:
        """The inputs of `steps` decode steps after a prompt.

        Args:
            attention_mask: of the prompt [batch, prompt columns].
            steps: decode steps at most.
            position_ids: of the prompt [batch or 1, prompt columns]; steps go on from the last. By default the tokens
                that the mask shows are counted.
        """
        batch, prompt = attention_mask.shape
        padded = not bool(attention_mask.all())
        lengths = attention_mask.sum(dim=-1, keepdim=True) if position_ids is None else position_ids[:, -1:] + 1
        if bool((lengths == lengths[:1]).all()):
            lengths = lengths[:1]
        positions = lengths + torch.arange(max(steps, 1), device=attention_mask.device)  # [batch or 1, steps]
        bias = self.bias(attention_mask, positions.shape[1], padded)
        looked_up, rotary = self.placed(positions.expand(batch, -1) if self._positions == "learned" else positions)
        looked_up = looked_up.T.contiguous() if looked_up is not None else None  # [steps, batch]
        return PreparedInputs(prompt, looked_up, rotary, bias)

    def placed(self, positions: torch.Tensor) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """What `positions` [batch or 1, columns] are to the model: rows of its table, or cosines and signed sines, each
        [batch or 1, columns, 1, rotated dimensions].
        """
        if self._positions == "learned":
            return positions + self._position_offset, None
        if self._positions == "alibi":
            return None, None
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = self._rotary(like, positions)  # each [batch or 1, columns, rotated dimensions]
        signs = torch.ones_like(sin)
        signs[..., : sin.shape[-1] // 2] = -1
        return None, (cos[:, :, None], (sin * signs)[:, :, None])

    def bias(self, mask: torch.Tensor, steps: int, padded: bool) -> torch.Tensor | None:
        """The values added to the scores of every column, prompt and generated."""
        if not padded and self._positions != "alibi":
            return None
        if not padded:
            mask = mask[:1]
        columns = torch.cat([mask, mask.new_ones(len(mask), steps)], dim=1)[:, None, None]  # [batch, 1, 1, columns]
        bias = torch.zeros(columns.shape, dtype=self.dtype, device=mask.device)
        bias = bias.masked_fill(columns == 0, float("-inf"))
        if self._positions == "alibi":
            distance = (columns.cumsum(dim=-1) - 1) * columns
            bias = bias + (alibi_slopes(self.heads, mask.device)[:, None, None] * distance).to(self.dtype)
        return bias

    def __call__(
        self,
        tokens: torch.Tensor,
        layers: Sequence[int],
        cache: PlannedCache,
        inputs: StepInputs,
        gpu_layers: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Run a decode step.

        Args:
            tokens: [batch].
            layers: the numbers of those that run, ascending.
            cache: that holds all earlier tokens.
            inputs: of the step.
            gpu_layers: what runs in place of the decoder's own layers, as kernels for a GPU.

        Returns:
            Logits [batch, vocabulary].
        """
        native = self._native
        if native is not None and len(tokens) <= native.most_tokens and not inputs.in_buffers:
            return self._ended(*native(tokens if native.embeds else self.embed(tokens, inputs), layers, cache, inputs))
        hidden = self.embed(tokens, inputs)
        run: Any = self.layers if gpu_layers is None else gpu_layers
        for index in layers:
            rows, of_layer = inputs.rows(index), inputs.of_layer(index)
            if rows is None:
                hidden = run[index](hidden, cache.layers[index], of_layer)
            else:
                hidden[:rows] = run[index](hidden[:rows], cache.layers[index], of_layer)
        return self.logits(hidden)

    def choosing(self, tokens: int) -> NativeSteps | None:
        """What chooses tokens several in a call, in passes of so many; None where only a step at a time will do."""
        native = self._native
        if native is None or not native.embeds or not native.ends_in_logits or tokens > native.most_tokens:
            return None
        return native

    def runs(self, layers: Collection[int]) -> bool:
        """Whether it can run `layers`."""
        return all(self.layers[layer] is not None for layer in layers)

    @property
    def draft_weights(self) -> Weights:
        """The weights of drafts that it verifies: fewer bits where the compiled kernels run them faster."""
        return "int8" if self.weights == "packed" and self._native is not None else self.weights

    def prefill(
        self,
        prompt: torch.Tensor,
        layers: Sequence[int],
        cache: PlannedCache,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        *,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Run a prompt through `layers` and fill the cache. Returns the last column's logits [batch, vocabulary].

        The topmost of the layers makes keys and values of all columns, and the rest of the last one alone.

        Args:
            prompt: tokens [batch, columns], or their embeddings [batch, columns, hidden].
            layers: those that run, ascending.
            cache: an empty one.
            attention_mask, position_ids: as for `step_inputs`.
            stop: how many of the layers, the lowest, the columns before the last one run; the others make keys and
                values of the state that these stopped with. None for all.
        """
        most = len(layers) - 1  # nothing is read of what the topmost layer would make of columns before the last
        stop = most if stop is None else min(stop, most)
        inputs = self._prompt_inputs(attention_mask, position_ids)
        flat = prompt.flatten(0, 1)
        if inputs.shown is not None:
            flat = flat[inputs.shown]
        native = self._native if self._native is not None and self._native.takes_prompt(inputs) else None
        if native is not None and native.embeds and prompt.dim() == 2:
            return self._ended(*native.prefill(flat, layers, cache, inputs, stop))
        hidden = self._enter(flat, inputs) if prompt.dim() == 3 else self.embed(flat, inputs)  # [tokens, hidden]
        if native is not None:
            return self._ended(*native.prefill(hidden, layers, cache, inputs, stop))
        for index in layers[:stop]:
            hidden = self.layers[index](hidden, cache.layers[index], inputs)
        last, of_last = inputs.last, inputs.for_last_tokens()
        for index in layers[stop:-1]:
            hidden = hidden.index_copy(0, last, self.layers[index](hidden, cache.layers[index], of_last, last))
        top = layers[-1]
        return self.logits(self.layers[top](hidden, cache.layers[top], of_last, last))

    def _ended(self, hidden: torch.Tensor | None, logits: torch.Tensor | None) -> torch.Tensor:
        """Logits in the model's type, of what the kernels gave."""
        return (self.logits(hidden.to(self.dtype)) if hidden is not None else logits).to(self.dtype)  # type: ignore[union-attr]

    def _prompt_inputs(self, mask: torch.Tensor, position_ids: torch.Tensor | None) -> PromptInputs:
        batch, columns = mask.shape
        padded = not bool(mask.all())
        positions = (mask.cumsum(dim=-1) - 1) * mask if position_ids is None else position_ids[:, -columns:]
        looked_up, rotary = self.placed(positions)
        shown = None
        if padded:
            mask = mask.clone()
            mask[:, -1] += ~mask.any(dim=-1)  # a row that shows nothing has to attend to something
            kept = mask != 0
            kept[:, -1] = True  # its logits are asked for, whatever the mask says
            shown = kept.flatten().nonzero()[:, 0]
            last = kept.sum(dim=-1).cumsum(dim=0) - 1
        else:
            last = torch.arange(1, batch + 1, device=mask.device) * columns - 1

        def of_tokens(placed: torch.Tensor) -> torch.Tensor:  # [batch or 1, columns, ...] -> [tokens, ...]
            flat = placed.expand(batch, *placed.shape[1:]).flatten(0, 1)
            return flat if shown is None else flat[shown]

        return PromptInputs(
            batch,
            columns,
            shown,
            last,
            position_ids=of_tokens(looked_up) if looked_up is not None else None,
            rotary=(of_tokens(rotary[0]), of_tokens(rotary[1])) if rotary is not None else None,
            bias=self.bias(mask, 0, padded),
        )

    def embed(self, tokens: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [batch, hidden] of `tokens` [batch], as the first layer takes them."""
        return self._enter(self._embedding(tokens), inputs)

    def _enter(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if self._embedding_norm is not None:
            hidden = self._embedding_norm(hidden)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if inputs.position_ids is not None:
            assert self._position_table is not None
            hidden = hidden + F.embedding(inputs.position_ids, self._position_table)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of a layer's output [rows, hidden], by the final norm and the head."""
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self.head(hidden)


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The slopes [heads] by which each head's scores fall with distance (Press, Smith and Lewis 2022, ALiBi)."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
    slopes += [2 ** (-4 * (2 * n + 1) / whole) for n in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
