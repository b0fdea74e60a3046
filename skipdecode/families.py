"""The supported model families: the path to their decoder layers, and the names of a layer's parts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from skipdecode.errors import ConfigError


@dataclass(frozen=True)
class BlockParts:
    """The names of a decoder layer's parts, from which the fast path computes (`skipdecode.fastpath.model`).

    Names are relative to the layer unless stated otherwise.

    Attributes:
        attention: the attention module; `qkv`, `query_norm` and `key_norm` are names within it.
        qkv: one projection for queries, keys and values, or three.
        out: the attention's output projection.
        attention_norm: the norm before the attention.
        mlp_norm: the norm before the feed-forward network; None where `attention_norm` serves both.
        up: the feed-forward network's first projection.
        down: its last projection.
        activation: its activation function.
        final_norm: the norm after the last layer, a name in the module that contains the list of layers.
        positions: how the position of a token enters the computation.
        gate: the projection whose activation multiplies the output of `up`, if there is one.
        interleaved: whether a single projection in `qkv` gives each head's query, key and value side by side.
        query_norm: a norm of the queries.
        key_norm: a norm of the keys.
        parallel: whether attention and feed-forward network both read the layer's input, or the name of the layer's
            attribute that says so.
        position_table: the table of learned positions, beside the list of layers.
        position_offset: a number that is added to positions before they are looked up in the table.
        embedding_norm: a norm of the embeddings, beside the list of layers.
        plain: config fields and the values that they must have for the fast path, since others change the computation.
    """

    attention: str
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    mlp_norm: str | None
    up: str
    down: str
    activation: str
    final_norm: str
    positions: Literal["learned", "rotary", "alibi"] = "rotary"
    gate: str | None = None
    interleaved: bool = False
    query_norm: str | None = None
    key_norm: str | None = None
    parallel: bool | str = False
    position_table: str | None = None
    position_offset: int = 0
    embedding_norm: str | None = None
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        layers: the path from the causal language model to the ModuleList of its decoder layers.
        parts: the names of a layer's parts; None where they aren't known, so that there is no fast path.
    """

    layers: str
    parts: BlockParts | None = None


_LLAMA = BlockParts(
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="self_attn.o_proj",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    activation="mlp.act_fn",
    final_norm="norm",
)
_GPT_NEOX = BlockParts(
    attention="attention",
    qkv=("query_key_value",),
    interleaved=True,
    out="attention.dense",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    activation="mlp.act",
    parallel="use_parallel_residual",
    final_norm="final_layer_norm",
)

# model_type in the config -> family
FAMILIES: dict[str, Family] = {
    "opt": Family(
        "model.decoder.layers",
        BlockParts(
            attention="self_attn",
            qkv=("q_proj", "k_proj", "v_proj"),
            out="self_attn.out_proj",
            attention_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            up="fc1",
            down="fc2",
            activation="activation_fn",
            final_norm="final_layer_norm",
            positions="learned",
            position_table="embed_positions",
            position_offset=2,
        ),
    ),
    "gpt2": Family(
        "transformer.h",
        BlockParts(
            attention="attn",
            qkv=("c_attn",),
            out="attn.c_proj",
            attention_norm="ln_1",
            mlp_norm="ln_2",
            up="mlp.c_fc",
            down="mlp.c_proj",
            activation="mlp.act",
            final_norm="ln_f",
            positions="learned",
            position_table="wpe",
            plain={"add_cross_attention": False, "reorder_and_upcast_attn": False},
        ),
    ),
    "gpt_neox": Family("gpt_neox.layers", _GPT_NEOX),
    "bloom": Family(
        "transformer.h",
        replace(
            _GPT_NEOX,
            attention="self_attention",
            out="self_attention.dense",
            activation="mlp.gelu_impl",
            parallel=False,
            final_norm="ln_f",
            positions="alibi",
            embedding_norm="word_embeddings_layernorm",
            plain={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
        ),
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), Family("model.layers", _LLAMA)),
    "qwen3": Family("model.layers", replace(_LLAMA, query_norm="q_norm", key_norm="k_norm")),
    "phi": Family(
        "model.layers",
        replace(
            _LLAMA,
            out="self_attn.dense",
            mlp_norm=None,
            gate=None,
            up="mlp.fc1",
            down="mlp.fc2",
            activation="mlp.activation_fn",
            parallel=True,
            final_norm="final_layernorm",
            plain={"qk_layernorm": False},
        ),
    ),
}


def register_family(model_type: str, layers: str, parts: BlockParts | None = None) -> None:
    """Add a model family to the table.

    Args:
        model_type: the `model_type` of its config.
        layers: the path to its decoder layers, such as "model.layers".
        parts: the names of a layer's parts; without them, decode steps run the model's own forward pass, which is
            slower than the fast path.
    """
    FAMILIES[model_type] = Family(layers, parts)


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers of peft, DistributedDataParallel or DeepSpeed.

    Raises ConfigError where there is none, and for peft's prompt tuning, whose virtual tokens shift the positions.
    """
    while not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError("prompt tuning adds virtual tokens, so a schedule can't be applied; use LoRA")
        wrapper: Any = model
        # peft's wrappers have get_base_model; the others keep the model in `module`.
        inner = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else getattr(wrapper, "module", None)
        if inner is None:
            raise ConfigError(f"{type(model).__name__} is not a transformers model: a schedule can't be applied to it")
        model = inner
    return model


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the decoder."""
    return config.get_text_config(decoder=True)


def longest_sequence(config: PretrainedConfig) -> int | None:
    """The maximum number of positions of a model with this config; None where there is none, as with ALiBi."""
    positions: int | None = getattr(text_config(config), "max_position_embeddings", None)
    return positions


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model, wrapped or not, lowest first. Raises ConfigError for a family that isn't known."""
    inner = unwrap(model)
    model_type = inner.config.model_type
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not known: add it with skipdecode.families.register_family "
            f"(known: {', '.join(sorted(FAMILIES))})"
        )
    path = FAMILIES[model_type].layers
    try:
        layers = inner.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(f"{type(inner).__name__} has no {path!r}: pass the causal language model itself") from error
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ConfigError(f"{path!r} of {type(inner).__name__} is not a list of layers")
    return layers


def exit_head(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The computation from a layer's output to logits: the final norm, the output projection if there is one, the head.

    Multi-layer early exit applies it to the output of any layer. Returns a function from hidden states [..., hidden] to
    logits [..., vocabulary]. Raises ConfigError for a family that isn't known, or whose final norm isn't known.
    """
    inner = unwrap(model)
    decoder_layers(inner)  # for its error where the family isn't known
    family = FAMILIES[inner.config.model_type]
    if family.parts is None:
        raise ConfigError(
            f"the final norm of model_type {inner.config.model_type!r} is not known: pass its parts to "
            "skipdecode.families.register_family"
        )
    body: Any = inner.get_submodule(family.layers.rpartition(".")[0])
    norm = getattr(body, family.parts.final_norm)  # None in opt-350m, whose layers normalise their outputs
    project_out = getattr(body, "project_out", None)  # only opt-350m has one
    head: Any = inner.get_output_embeddings()
    steps = [step for step in (norm, project_out, head) if step is not None]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        for step in steps:
            hidden = step(hidden)
        return hidden

    return logits
