"""Decode steps without the overhead of a model's forward pass: nothing per token that doesn't depend on the token.

A forward pass of transformers is made for any length and any cache. One step of decoding is a special case: one token
a row, all active layers holding the same columns (law 1), so masks, places and layer lists are known before the first
step. What is left is a dozen operations a layer, done here on [batch, hidden] with the model's own weights. The names
of the weights are a family's only contribution (`skipdecode.families`); models that aren't made of plain parts
(adapters, hooks, other libraries' quantisation) are left to their own forward pass.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skipdecode.cache import PlannedCache, PlannedLayer
from skipdecode.errors import ConfigError, unknown
from skipdecode.families import FAMILIES, BlockParts, decoder_layers, text_config
from skipdecode.int8 import Int8Linear

Weights = Literal["model", "packed", "int8"]
Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out]

# Where queries, keys and values are three projections of no more weights than this together, a copy in which they are
# one saves more in calls than it costs in memory. Larger ones are bound by reading them, and stay as they are.
FUSE_BELOW = 2**22


class Step:
    """What a decode step needs beside its tokens: where they stand, and which columns they attend to.

    Attributes:
        places: positions of the rows' tokens [batch], for a model that looks them up.
        rotary: cosines and signed sines [batch or 1, 1, rotated dimensions], for a model that rotates.
        bias: added to attention scores [batch, 1 or heads, 1, columns], or None where every column counts.
        at: the column that the tokens are.
    """

    __slots__ = ("at", "bias", "places", "rotary")

    def __init__(
        self,
        at: int,
        places: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        self.at = at
        self.places = places
        self.rotary = rotary
        self.bias = bias

    def append(
        self, layer: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Write this token's key and value [batch, heads, head_dim]; returns all to attend to, and their bias."""
        keys: Any = layer.keys
        values: Any = layer.values
        end = self.at + 1
        keys[:, :, self.at] = key
        values[:, :, self.at] = value
        layer.length = end
        start = 0 if window is None else max(0, end - window)
        bias = self.bias[..., start:end] if self.bias is not None else None
        return keys[:, :, start:end], values[:, :, start:end], bias


class LeanBlock:
    """One decoder layer, for one token a row."""

    def __init__(self, layer: nn.Module, parts: BlockParts, config: Any, make_linear: Callable[..., Linear]) -> None:
        attention: Any = layer.get_submodule(parts.attention)
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        projections = [getattr(attention, name) for name in parts.qkv]
        on_cpu = projections[0].weight.device.type == "cpu"
        outputs = sum(_sizes(projection)[1] for projection in projections)
        self.head_dim = outputs // (self.heads + 2 * self.kv_heads)
        scaling = getattr(attention, "scaling", None)
        self.scaling = scaling if scaling is not None else self.head_dim**-0.5
        self.window = _window(attention, config)
        self.mix = _mix_on_cpu if on_cpu else F.scaled_dot_product_attention
        self.interleaved = parts.interleaved
        self.qkv = _project_together(projections, make_linear)
        self.query_norm = _norm(getattr(attention, parts.query_norm)) if parts.query_norm else None
        self.key_norm = _norm(getattr(attention, parts.key_norm)) if parts.key_norm else None
        self.out = make_linear(layer.get_submodule(parts.out))
        self.attention_norm = _norm(layer.get_submodule(parts.attention_norm))
        self.mlp_norm = _norm(layer.get_submodule(parts.mlp_norm)) if parts.mlp_norm else None
        self.up = make_linear(layer.get_submodule(parts.up))
        self.gate = make_linear(layer.get_submodule(parts.gate)) if parts.gate else None
        self.down = make_linear(layer.get_submodule(parts.down))
        self.activation = _activation(layer.get_submodule(parts.activation))
        self.parallel = getattr(layer, parts.parallel) if isinstance(parts.parallel, str) else parts.parallel
        self.norm_first = getattr(layer, "do_layer_norm_before", True)  # opt-350m normalises after each half

    def __call__(self, hidden: torch.Tensor, cached: PlannedLayer, step: Step) -> torch.Tensor:
        """Run the layer on `hidden` [batch, hidden]."""
        if not self.norm_first:
            assert self.mlp_norm is not None
            hidden = self.attention_norm(hidden + self.attend(hidden, cached, step))
            return self.mlp_norm(hidden + self.feed_forward(hidden))
        normed = self.attention_norm(hidden)
        attended = self.attend(normed, cached, step)
        if self.parallel:
            return hidden + attended + self.feed_forward(self.mlp_norm(hidden) if self.mlp_norm else normed)
        assert self.mlp_norm is not None
        hidden = hidden + attended
        return hidden + self.feed_forward(self.mlp_norm(hidden))

    def attend(self, hidden: torch.Tensor, cached: PlannedLayer, step: Step) -> torch.Tensor:
        """The attention half, without norm and residual."""
        batch, turned = hidden.shape[0], self.heads + self.kv_heads
        if self.interleaved:
            by_head = self.qkv(hidden).view(batch, self.heads, 3, self.head_dim)
            all_heads = by_head.transpose(1, 2).reshape(batch, 3 * self.heads, self.head_dim)
        else:
            all_heads = self.qkv(hidden).view(batch, turned + self.kv_heads, self.head_dim)
        query_key, value = all_heads[:, :turned], all_heads[:, turned:]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key[:, : self.heads], query_key[:, self.heads :]
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if step.rotary is not None:
            query_key = _rotate(query_key, *step.rotary)
        query, key = query_key[:, : self.heads], query_key[:, self.heads :]
        keys, values, bias = step.append(cached, key, value, self.window)
        # Heads that share keys stand where a sequence's queries would: no key or value is repeated.
        grouped = query.view(batch, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        mixed = self.mix(grouped, keys, values, attn_mask=bias, scale=self.scaling)
        return self.out(mixed.reshape(batch, self.heads * self.head_dim))

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The feed-forward half, without norm and residual."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


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
        make_linear = {"model": _linear, "packed": _packed_linear, "int8": _int8_linear}[weights]
        self.dtype = model.dtype
        self.blocks = [LeanBlock(layer, parts, config, make_linear) for layer in decoder_layers(model)]
        self.windowed = any(block.window is not None for block in self.blocks)
        self._positions = parts.positions
        self._heads = config.num_attention_heads
        self._embedding: Any = model.get_input_embeddings()
        self._embedding_norm = _norm(getattr(body, parts.embedding_norm)) if parts.embedding_norm else None
        self._place_table = getattr(body, parts.position_table).weight if parts.position_table else None
        self._place_offset = parts.position_offset
        self._rotary: Any = getattr(body, "rotary_emb", None)
        self._project_in: Any = getattr(body, "project_in", None)  # opt-350m
        self._project_out: Any = getattr(body, "project_out", None)
        norm = getattr(body, parts.final_norm)  # opt-350m has none
        self._final_norm = _norm(norm) if norm is not None else None
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
        hidden = self._embedding(tokens)
        if self._embedding_norm is not None:
            hidden = self._embedding_norm(hidden)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if step.places is not None:
            assert self._place_table is not None
            hidden = hidden + F.embedding(step.places, self._place_table)
        blocks, cached = self.blocks, cache.layers
        for index in layers:
            hidden = blocks[index](hidden, cached[index], step)  # type: ignore[arg-type]
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
    if weights not in decoders or decoders[weights][0] != state:
        decoders.pop(weights, None)  # what it holds is freed before the next is made
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
    if not model.dtype.is_floating_point or type(model.get_output_embeddings()) is not nn.Linear:
        return "its weights are quantised"
    return None


def _parts(model: PreTrainedModel) -> BlockParts | None:
    family = FAMILIES.get(model.config.model_type)
    return family.parts if family is not None else None


def _sizes(projection: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    weight: Any = projection.weight
    rows, columns = weight.shape
    return (rows, columns) if isinstance(projection, Conv1D) else (columns, rows)


def _weight(projection: Any) -> torch.Tensor:
    """[out, in], which Conv1D keeps transposed."""
    weight: torch.Tensor = projection.weight.detach()
    return weight.T if isinstance(projection, Conv1D) else weight


def _linear(projection: Any) -> Linear:
    """A projection with the module's own weights, without the call of a module."""
    return functools.partial(F.linear, weight=_weight(projection), bias=projection.bias)


def _packed_linear(projection: Any) -> Linear:
    """A projection with a copy of its weights in oneDNN's blocked layout."""
    # The number of rows that the layout is chosen for: 8 was as fast as 1 for a single row, and faster for more.
    weight = torch.ops.mkldnn._reorder_linear_weight(_weight(projection).contiguous(), 8)
    bias, run, no_scalars = projection.bias, torch.ops.mkldnn._linear_pointwise, []  # type: ignore[var-annotated]
    return lambda hidden: run(hidden, weight, bias, "none", no_scalars, "")


def _int8_linear(projection: Any) -> Linear:
    return Int8Linear(_weight(projection), projection.bias)


def _project_together(projections: Sequence[nn.Module], make_linear: Callable[..., Linear]) -> Linear:
    """Queries, keys and values in one call: [rows, in] -> [rows, sum of outs]."""
    if len(projections) == 1:
        return make_linear(projections[0])
    inputs, outputs = _sizes(projections[0])[0], sum(_sizes(p)[1] for p in projections)
    if make_linear is _linear and inputs * outputs > FUSE_BELOW:
        singles = [make_linear(projection) for projection in projections]
        return lambda hidden: torch.cat([single(hidden) for single in singles], dim=-1)
    with torch.device("meta"):
        fused = nn.Linear(inputs, outputs, bias=projections[0].bias is not None)
    fused.weight = nn.Parameter(torch.cat([_weight(p) for p in projections]), requires_grad=False)
    if fused.bias is not None:
        biases: list[Any] = [p.bias for p in projections]
        fused.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return make_linear(fused)


def _norm(module: Any) -> Linear:
    """A LayerNorm or RMSNorm as one operation."""
    if isinstance(module, nn.LayerNorm):
        shape, weight, bias = module.normalized_shape, module.weight, module.bias
        return lambda hidden: F.layer_norm(hidden, shape, weight, bias, module.eps)
    # Gemma's is centred on one. Each family has its own class, all with the formula of Llama's.
    scale = module.weight.detach() + 1 if type(module).__name__.startswith("Gemma") else module.weight.detach()
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return lambda hidden: F.rms_norm(hidden, scale.shape, scale, eps)


def _activation(module: nn.Module) -> Linear:
    """The activation as one operation where torch has one."""
    fast: dict[str, Linear] = {
        "ReLU": torch.relu,
        "NewGELUActivation": functools.partial(F.gelu, approximate="tanh"),
        "BloomGelu": functools.partial(F.gelu, approximate="tanh"),
    }
    return fast.get(type(module).__name__, module)


def _window(attention: nn.Module, config: Any) -> int | None:
    """How many columns back a layer attends, itself included; None for all."""
    everywhere = ["sliding_attention"] * config.num_hidden_layers if config.model_type == "mistral" else None
    kinds = getattr(config, "layer_types", None) or everywhere
    index: Any = attention.layer_idx
    sliding = kinds is not None and kinds[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None


def _mix_on_cpu(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, attn_mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of one column, as `scaled_dot_product_attention`, whose kernels on CPU are made for many columns.

    Args:
        query: [batch, heads, queries, head_dim]
        keys, values: [batch, heads, columns, head_dim]
    """
    batch, heads, queries, head_dim = query.shape
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)  # [batch * heads, columns, head_dim], not copied
    # Keys times queries and not the other way round: with keys on the right each call would transpose all of them.
    scores = torch.bmm(flat_keys, (query * scale).view(-1, queries, head_dim).transpose(1, 2)).transpose(1, 2)
    if attn_mask is not None:
        scores = (scores.view(batch, heads, queries, -1) + attn_mask).view(batch * heads, queries, -1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(shares, flat_values).view(batch, heads, queries, head_dim)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) of [batch, heads, head_dim], of the first dimensions where few rotate.

    The half of the dimensions that is rotated in comes with its sign in `signed_sin`.
    """
    turned = cos.shape[-1]
    if turned == heads.shape[-1]:
        return torch.addcmul(heads * cos, heads.roll(turned // 2, dims=-1), signed_sin)
    first, rest = heads[..., :turned], heads[..., turned:]
    return torch.cat([_rotate(first, cos, signed_sin), rest], dim=-1)


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """How much each head's scores fall with distance (Press, Smith and Lewis 2022, ALiBi), [heads]."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
    slopes += [2 ** (-4 * (2 * n + 1) / whole) for n in range(heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
