"""Decode steps without the overhead of a model's forward pass: nothing per token that doesn't depend on the token.

A forward pass of transformers is made for any length and any cache. One step of decoding is a special case: one token
a row, all active layers holding the same columns (law 1), so masks, places and layer lists are known before the first
step. What is left is a dozen operations a layer, done here on [batch, hidden] with the model's own weights. The names
of the weights are a family's only contribution (`skipdecode.families`); models that aren't made of plain parts
(adapters, hooks, other libraries' quantisation) are left to their own forward pass.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from skipdecode.block import LeanBlock, Step, make_norm
from skipdecode.cache import PlannedCache
from skipdecode.errors import ConfigError, unknown
from skipdecode.families import FAMILIES, BlockParts, decoder_layers, text_config
from skipdecode.projections import MAKERS, Weights


class LeanDecoder:
    """A model's decode steps. Holds its parts and not the model itself, so that the model can be freed.

    Args:
        model: a model for which `why_not_lean` has no reason.
        weights: "model" computes with the model's own weights, "packed" with copies in the layout that the processor
            reads fastest, "int8" with 8-bit copies. Copies are of all projections, the LM head among them; both kinds
            need a CPU.
    """

    def __init__(self, model: PreTrainedModel, weights: Weights = "model") -> None:
        parts = _parts(model)
        assert parts is not None
        config = text_config(model.config)
        body: Any = model.get_submodule(FAMILIES[model.config.model_type].layers.rpartition(".")[0])
        make_linear = MAKERS[weights]
        self.dtype = model.dtype
        self.blocks = [LeanBlock(layer, parts, config, make_linear) for layer in decoder_layers(model)]
        self.windowed = any(block.window is not None for block in self.blocks)
        self._positions = parts.positions
        self._heads = config.num_attention_heads
        self._embedding: Any = model.get_input_embeddings()
        self._embedding_norm = make_norm(getattr(body, parts.embedding_norm)) if parts.embedding_norm else None
        self._place_table = getattr(body, parts.position_table).weight if parts.position_table else None
        self._place_offset = parts.position_offset
        self._rotary: Any = getattr(body, "rotary_emb", None)
        self._project_in: Any = getattr(body, "project_in", None)  # opt-350m
        self._project_out: Any = getattr(body, "project_out", None)
        norm = getattr(body, parts.final_norm)  # opt-350m has none
        self._final_norm = make_norm(norm) if norm is not None else None
        self._head = make_linear(model.get_output_embeddings())

    def steps(self, attention_mask: torch.Tensor, count: int) -> Callable[[int], Step]:
        """Everything that `count` decode steps after a prompt need, prepared at once.

        Args:
            attention_mask: of the prompt [batch, prompt columns].
            count: steps at most.

        Returns:
            A function from a step's number to the Step.
        """
        batch, prompt = attention_mask.shape
        padded = not bool(attention_mask.all())
        lengths = attention_mask.sum(dim=-1, keepdim=True) if padded else attention_mask.sum(dim=-1, keepdim=True)[:1]
        places = lengths + torch.arange(max(count, 1), device=attention_mask.device)  # [batch or 1, count]
        bias = self._bias(attention_mask, places, padded)
        rotary: Any = None
        looked_up: Any = None
        if self._positions == "rotary":
            like = torch.empty(0, dtype=self.dtype, device=attention_mask.device)
            cos, sin = self._rotary(like, places)  # each [batch or 1, count, rotated dimensions]
            signs = torch.ones_like(sin)
            signs[..., : sin.shape[-1] // 2] = -1
            rotary = (cos[:, :, None], (sin * signs)[:, :, None])
        elif self._positions == "learned":
            looked_up = (places + self._place_offset).expand(batch, -1).T.contiguous()  # [count, batch]

        def step(i: int) -> Step:
            turn = (rotary[0][:, i], rotary[1][:, i]) if rotary is not None else None
            return Step(prompt + i, looked_up[i] if looked_up is not None else None, turn, bias)

        return step

    def _bias(self, mask: torch.Tensor, places: torch.Tensor, padded: bool) -> torch.Tensor | None:
        """What is added to the scores of every column, prompt and generated."""
        batch, count = mask.shape[0], places.shape[1]
        if not padded and self._positions != "alibi":
            return None
        columns = torch.cat([mask, mask.new_ones(batch, count)], dim=1)[:, None, None]  # [batch, 1, 1, columns]
        bias = torch.zeros(columns.shape, dtype=self.dtype, device=mask.device)
        bias = bias.masked_fill(columns == 0, float("-inf"))
        if self._positions == "alibi":
            distance = (columns.cumsum(dim=-1) - 1) * columns
            bias = bias + (alibi_slopes(self._heads, mask.device)[:, None, None] * distance).to(self.dtype)
        return bias

    def __call__(self, tokens: torch.Tensor, layers: Sequence[int], cache: PlannedCache, step: Step) -> torch.Tensor:
        """Run `tokens` [batch] through `layers`, on top of the cache. Returns logits [batch, vocabulary]."""
        hidden = self.embed(tokens, step)
        blocks, cached = self.blocks, cache.layers
        for index in layers:
            hidden = blocks[index](hidden, cached[index], step)  # type: ignore[arg-type]
        return self.logits(hidden)

    def embed(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        """What the first layer gets of `tokens` [batch]: [batch, hidden]."""
        hidden: torch.Tensor = self._embedding(tokens)
        if self._embedding_norm is not None:
            hidden = self._embedding_norm(hidden)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if step.places is not None:
            assert self._place_table is not None
            hidden = hidden + F.embedding(step.places, self._place_table)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the norm and the head make of a layer's output [rows, hidden]: [rows, vocabulary]."""
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden)


# model -> kind of weights -> (what the model's weights were, its decoder)
_DECODERS: weakref.WeakKeyDictionary[nn.Module, dict[Weights, tuple[Any, LeanDecoder]]] = weakref.WeakKeyDictionary()


def lean_decoder(model: PreTrainedModel, weights: Weights | None = None) -> LeanDecoder:
    """The model's LeanDecoder, made when it is first asked for and again when weights have changed.

    Args:
        model, weights: as in LeanDecoder; None for what `choose_weights` says.

    Raises:
        ConfigError: for kinds of weights that don't exist, or not on the model's device.
    """
    weights = choose_weights(model) if weights is None else weights
    if weights not in get_args(Weights):
        raise unknown("weights", weights, get_args(Weights))
    if weights != "model" and (model.device.type != "cpu" or not torch.backends.mkldnn.is_available()):
        raise ConfigError(f"weights={weights!r} needs a CPU with oneDNN, and the model is on {model.device}")
    state = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())
    decoders = _DECODERS.setdefault(model, {})
    for kind in [kind for kind, (known, _) in decoders.items() if known != state]:
        del decoders[kind]  # its copies are freed before the next are made
    if weights not in decoders:
        decoders[weights] = (state, LeanDecoder(model, weights))
    return decoders[weights][1]


def choose_weights(model: PreTrainedModel) -> Weights:
    """What lean steps compute with unless they are told: "packed" on a CPU with oneDNN where the copies fit in half of
    the memory that is free, else "model".
    """
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return "model"
    supported = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    if not supported.get(model.dtype, False):
        return "model"
    if "packed" in _DECODERS.get(model, {}):
        return "packed"
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    return "packed" if needed < _free_memory() / 2 else "model"


def _free_memory() -> float:
    """Bytes that can be allocated without swapping, as Linux says it; elsewhere as many as one likes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    free = [line for line in lines if line.startswith("MemAvailable:")]
    return int(free[0].split()[1]) * 1024 if free else math.inf


def why_not_lean(model: PreTrainedModel) -> str | None:
    """Why a model's decode steps must go through its own forward pass, or None where they needn't."""
    parts = _parts(model)
    if parts is None:
        return f"the parts of model_type {model.config.model_type!r} are not known"
    if model.training:
        return "the model is in training mode"
    config = text_config(model.config)
    for name, value in parts.plain.items():
        if getattr(config, name, value) != value:
            return f"its config has {name}={getattr(config, name)!r}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding is of type {rope['rope_type']!r}, which depends on the length"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return f"{name or 'the model'} has hooks"
        if not type(module).__module__.startswith(("torch.nn.modules.", "transformers.")):
            return f"{name} is a {type(module).__name__}"
    parameters = list(model.parameters())
    if len({(p.device, p.dtype) for p in parameters}) > 1:
        return "its weights are on several devices or of several types"
    if any(hasattr(p, "ds_id") for p in parameters):
        return "its weights are sharded"
    if getattr(model.config, "quantization_config", None) is not None or not model.dtype.is_floating_point:
        return "its weights are quantised"
    return None


def _parts(model: PreTrainedModel) -> BlockParts | None:
    family = FAMILIES.get(model.config.model_type)
    return family.parts if family is not None else None


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """How much each head's scores fall with distance (Press, Smith and Lewis 2022, ALiBi), [heads]."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
    slopes += [2 ** (-4 * (2 * n + 1) / whole) for n in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
