"""Prefill and decode steps without the model's own forward pass.

A forward pass of transformers serves any length and any cache. A decode step is a special case: each sequence has one
token, and all layers that run hold the same slots, as each step runs a subset of the layers of the step before. So
masks, positions and layers are known before the first step, and a dozen operations on [batch, hidden] remain of each
layer. A prompt goes through the same operations, a row for each token. A family of models contributes only the names
of its weights (`skipdecode.families`). Models with adapters, hooks or another library's quantisation use their own
forward pass.
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
    """A model's prefill and decode steps. It holds the model's parts, not the model, so that the model can be freed.

    Args:
        model: a model that `FastPath.why_not` gives no reason against.
        weights: "model" computes with the model's own weights, "packed" with copies in the layout that the processor
            reads fastest, "int8" and "int4" with copies in 8 and 4 bits; "int4-int8-head" and "int8-int4-head" differ
            in the LM head. All projections are copied. Packed copies need a CPU, and 4 bits there the compiled kernels
            (`skipdecode.kernels.cpu`); on a GPU 8 and 4 bits need the Triton kernels (`skipdecode.kernels.gpu`).
        layers: the layers that can run, which must include the first one; None for all.
        before: an earlier decoder of the same model and weights, whose copies are used again.
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
        # Shape -> `skipdecode.fastpath.cuda_graphs.StepGraphs`, the least recently used first.
        self.kept_graphs: OrderedDict[Any, Any] = OrderedDict()
        modules = decoder_layers(model)
        self.layers: list[Any] = [None] * len(modules) if before is None else list(before.layers)
        for n in range(len(modules)) if layers is None else layers:
            self.layers[n] = self.layers[n] or FastLayer(modules[n], parts, config, make_linear)
        self.windowed = any(layer.window is not None for layer in self.layers if layer is not None)
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
            attention_mask: of the prompt [batch, padded prompt length].
            steps: the maximum number of decode steps.
            position_ids: of the prompt [batch or 1, padded prompt length]; steps continue from the last one. By
                default the tokens that aren't padding are counted.
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
        """The model's inputs for `positions` [batch or 1, length].

        Returns rows of its table of positions [batch or 1, length], and cosines and signed sines [batch or 1, length,
        1, rotated dimensions]; None for what the model doesn't have.
        """
        if self._positions == "learned":
            return positions + self._position_offset, None
        if self._positions == "alibi":
            return None, None
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = self._rotary(like, positions)  # each [batch or 1, length, rotated dimensions]
        signs = torch.ones_like(sin)
        signs[..., : sin.shape[-1] // 2] = -1
        return None, (cos[:, :, None], (sin * signs)[:, :, None])

    def bias(self, mask: torch.Tensor, steps: int, padded: bool) -> torch.Tensor | None:
        """The values added to attention scores for padding and ALiBi, of the prompt's slots and of `steps` more."""
        if not padded and self._positions != "alibi":
            return None
        if not padded:
            mask = mask[:1]
        slots = torch.cat([mask, mask.new_ones(len(mask), steps)], dim=1)[:, None, None]  # [batch, 1, 1, slots]
        bias = torch.zeros(slots.shape, dtype=self.dtype, device=mask.device)
        bias = bias.masked_fill(slots == 0, float("-inf"))
        if self._positions == "alibi":
            distance = (slots.cumsum(dim=-1) - 1) * slots
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
        """Run a decode step of tokens [batch]. Returns logits [batch, vocabulary].

        Args:
            layers: the numbers of those that run, ascending.
            gpu_layers: what runs in place of the decoder's own layers, as kernels for a GPU.
        """
        native = self._native
        if native is not None and len(tokens) <= native.max_tokens and not inputs.in_buffers:
            return self._ended(*native(tokens if native.embeds else self.embed(tokens, inputs), layers, cache, inputs))
        hidden = self.embed(tokens, inputs)
        run: Any = self.layers if gpu_layers is None else gpu_layers
        cached = cache.layers
        for index in layers:
            rows, of_layer = inputs.rows(index), inputs.of_layer(index)
            if rows is None:
                hidden = run[index](hidden, cached[index], of_layer)
            else:
                hidden[:rows] = run[index](hidden[:rows], cached[index], of_layer)
        return self.logits(hidden)

    def choosing(self, tokens: int) -> NativeSteps | None:
        """The kernels that decode several steps in one call; None where passes of so many tokens need a call each."""
        native = self._native
        if native is None or not native.embeds or not native.ends_in_logits or tokens > native.max_tokens:
            return None
        return native

    def runs(self, layers: Collection[int]) -> bool:
        """Whether it can run `layers`."""
        return all(self.layers[layer] is not None for layer in layers)

    @property
    def draft_weights(self) -> Weights:
        """The weights that drafts use: 8 bits where the compiled kernels run them faster."""
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
        """Run a prompt through `layers` and fill the cache.

        The last layer computes keys and values of all tokens, but an output of the last token of each sequence only.
        Returns logits of the last tokens [batch, vocabulary].

        Args:
            prompt: tokens [batch, length], or their embeddings [batch, length, hidden].
            layers: the numbers of those that run, ascending.
            cache: an empty one.
            attention_mask, position_ids: as for `step_inputs`.
            stop: how many of the layers, from the lowest, all tokens run. The last tokens run all layers; above `stop`
                keys and values of the other tokens come from the states that they stopped with. None for all.
        """
        inputs = self.prompt_inputs(attention_mask, position_ids)
        flat = prompt.flatten(0, 1)
        return self.run_prompt(flat if inputs.shown is None else flat[inputs.shown], layers, cache, inputs, stop)

    def run_prompt(
        self, entered: torch.Tensor, layers: Sequence[int], cache: Any, inputs: PromptInputs, stop: int | None
    ) -> torch.Tensor:
        """As `prefill`, of tokens [tokens], or embeddings [tokens, hidden], whose `inputs` are prepared.

        They may be the next tokens of prompts of which `cache` holds the tokens before.
        """
        stop = layers_for_all_tokens(layers, stop)
        native = self._native if self._native is not None and self._native.takes_prompt(inputs) else None
        if native is not None and native.embeds and entered.dim() == 1:
            return self._ended(*native.prefill(entered, layers, cache, inputs, stop))
        hidden = self._enter(entered, inputs) if entered.dim() == 2 else self.embed(entered, inputs)
        if native is not None:
            return self._ended(*native.prefill(hidden, layers, cache, inputs, stop))
        return self._run_layers(hidden, layers, cache, inputs, stop)

    def padded_prefill(
        self, tokens: torch.Tensor, layers: Sequence[int], cache: PlannedCache, inputs: PromptInputs, stop: int | None
    ) -> torch.Tensor:
        """As `prefill`, of flat tokens [batch * length] with `prompt_inputs` that keep the padding.

        It runs the same operations for every prompt of a shape, and none of them waits for the device.
        """
        return self._run_layers(self.embed(tokens, inputs), layers, cache, inputs, layers_for_all_tokens(layers, stop))

    def _run_layers(
        self, hidden: torch.Tensor, layers: Sequence[int], cache: PlannedCache, inputs: PromptInputs, stop: int
    ) -> torch.Tensor:
        for index in layers[:stop]:
            hidden = self.layers[index](hidden, cache.layers[index], inputs.of_layer(index))
        last, of_last = inputs.last, inputs.for_last_tokens()
        for index in layers[stop:-1]:
            of_layer = of_last.of_layer(index)
            hidden = hidden.index_copy(0, last, self.layers[index](hidden, cache.layers[index], of_layer, last))
        top = layers[-1]
        return self.logits(self.layers[top](hidden, cache.layers[top], of_last.of_layer(top), last))

    def _ended(self, hidden: torch.Tensor | None, logits: torch.Tensor | None) -> torch.Tensor:
        """Logits in the model's type, from what the kernels returned."""
        return (self.logits(hidden.to(self.dtype)) if hidden is not None else logits).to(self.dtype)  # type: ignore[union-attr]

    def prompt_inputs(
        self, mask: torch.Tensor, position_ids: torch.Tensor | None, *, keep_padding: bool = False
    ) -> PromptInputs:
        """The inputs of a prompt: of the tokens that aren't padding, or of all, so that only the shape matters.

        Args:
            mask, position_ids: as for `step_inputs`.
            keep_padding: whether padding runs too. What it computes is finite, and nothing attends to it.
        """
        batch, width = mask.shape
        padded = not keep_padding and not bool(mask.all())
        positions = (mask.cumsum(dim=-1) - 1) * mask if position_ids is None else position_ids[:, -width:]
        looked_up, rotary = self.placed(positions)
        shown = None
        if padded or keep_padding:
            mask = mask.clone()
            mask[:, -1] += ~mask.any(dim=-1)  # a sequence of padding only has to attend to something
        bias = self.bias(mask, 0, padded or keep_padding)
        if keep_padding and bias is not None:
            # Padding has only padding to attend to: -inf at all of its slots gives NaN in some attention kernels.
            bias = bias.clamp_min(torch.finfo(bias.dtype).min / 2)
        if padded:
            kept = mask != 0
            kept[:, -1] = True  # its logits are returned, whatever the mask says
            shown = kept.flatten().nonzero()[:, 0]
            last = kept.sum(dim=-1).cumsum(dim=0) - 1
        else:
            last = torch.arange(1, batch + 1, device=mask.device) * width - 1

        def of_tokens(placed: torch.Tensor) -> torch.Tensor:  # [batch or 1, width, ...] -> [tokens, ...]
            flat = placed.expand(batch, *placed.shape[1:]).flatten(0, 1)
            return flat if shown is None else flat[shown]

        return PromptInputs(
            batch,
            width,
            shown,
            last,
            position_ids=of_tokens(looked_up) if looked_up is not None else None,
            rotary=(of_tokens(rotary[0]), of_tokens(rotary[1])) if rotary is not None else None,
            bias=bias,
        )

    def embed(self, tokens: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """The first layer's input [batch, hidden] for `tokens` [batch]."""
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
        """Logits [rows, vocabulary] of a layer's output [rows, hidden], by the final norm and the LM head."""
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self.head(hidden)


def layers_for_all_tokens(layers: Sequence[int], stop: int | None) -> int:
    """How many of a prompt's layers all tokens run: not the last one, whose output is read for the last tokens only."""
    return len(layers) - 1 if stop is None else min(stop, len(layers) - 1)


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The slopes [heads] by which each head's scores fall with distance (Press, Smith and Lewis 2022, ALiBi)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    slopes += [2 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
