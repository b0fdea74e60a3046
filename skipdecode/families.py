"""The model families that the toolkit knows: the path to their decoder layers, and the parts of one layer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from skipdecode.errors import ConfigError


@dataclass(frozen=True)
class BlockParts:
    """The names of a decoder layer's parts, which the fast path computes with (`skipdecode.fastpath.model`).

    Attributes:
        attention: the attention module; `qkv` and `query_norm`, `key_norm` are names within it.
        qkv: one projection for queries, keys and values, or three.
        interleaved: whether the single projection gives each head's query, key and value side by side.
        out: the attention's output projection.
        attention_norm, mlp_norm: the norms before each half of the layer; no `mlp_norm` where both read the same.
        up, down, activation: the feed-forward half; `gate` where the activation gates another projection.
        parallel: whether both halves read the layer's input; or the layer's flag that says so.
        final_norm: after the last layer, beside the list of layers.
        positions: the way in which a token's position enters.
        position_table, position_offset: the table of positions, and what is added to them before they are looked up.
        embedding_norm: a norm of the embeddings.
        plain: what the config must say, for a value that changes the computation.
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
    """The path from the causal LM to the ModuleList of its decoder layers; and its parts, where they are known."""

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

# model_type of the config -> what is known of it.
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
    """Name the path to the decoder layers of a family that isn't in the table, such as `"model.layers"`.

    Without `parts` its decode steps go through the model's own forward pass, which is slower.
    """
    FAMILIES[model_type] = Family(layers, parts)


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers of peft, DistributedDataParallel or DeepSpeed.

    Raises ConfigError where there is none, and for peft's prompt tuning, whose virtual tokens shift the columns.
    """
    while not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError("prompt tuning adds virtual columns, so a schedule can't be applied; use LoRA")
        inner = _base_model(model)
        if inner is None:
            raise ConfigError(f"{type(model).__name__} is not a transformers model: a schedule can't be applied to it")
        model = inner
    return model


def _base_model(wrapper: nn.Module) -> nn.Module | None:
    """One wrapper less: peft's, or one that keeps the model in `module`."""
    if hasattr(wrapper, "get_base_model"):
        return cast(nn.Module, cast(Any, wrapper).get_base_model())
    return getattr(wrapper, "module", None)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the decoder."""
    return config.get_text_config(decoder=True)


def longest_sequence(config: PretrainedConfig) -> int | None:
    """The number of positions that a model of this config has; None where there is no limit, as with ALiBi."""
    positions: int | None = getattr(text_config(config), "max_position_embeddings", None)
    return positions


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a (possibly wrapped) model, bottom first.

    Raises ConfigError for a family that isn't known, naming `register_family` as the way to add it.
    """
    inner = unwrap(model)
    model_type = inner.config.model_type
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not known: name its layers with skipdecode.families.register_family "
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
    """The way from the last layer's output to logits: the final norm, the projection out where there is one, the head.

    An exit after any other layer goes through the same (multi-layer early exit).

    Args:
        model: a causal language model, wrapped or not.

    Returns:
        A function from hidden states [..., hidden] to logits [..., vocabulary].

    Raises:
        ConfigError: for a family whose final norm is not known.
    """
    inner = unwrap(model)
    decoder_layers(inner)  # an unknown family is refused in its own words
    family = FAMILIES[inner.config.model_type]
    if family.parts is None:
        raise ConfigError(
            f"the final norm of model_type {inner.config.model_type!r} is not known: name its parts with "
            "skipdecode.families.register_family"
        )
    body: Any = inner.get_submodule(family.layers.rpartition(".")[0])
    norm = getattr(body, family.parts.final_norm)  # opt-350m has none: its layers normalise what they give
    project_out = getattr(body, "project_out", None)  # opt-350m
    head: Any = inner.get_output_embeddings()
    steps = [step for step in (norm, project_out, head) if step is not None]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        for step in steps:
            hidden = step(hidden)
        return hidden

    return logits
