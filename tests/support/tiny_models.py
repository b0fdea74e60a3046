"""Tiny random models whose greedy texts vary, and ragged prompts for them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

PAD, END, VOCABULARY = 1, 2, 61

OPT_KINDS: dict[str, dict[str, Any]] = {
    "opt": {},
    # opt-350m: normalises after, and projects into and out of a smaller embedding
    "opt-350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
}


TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 96},
    "bloom": {"hidden_size": 32, "n_layer": 6, "n_head": 4},
    "gpt_neox": {"intermediate_size": 48},
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 8},
    "qwen2": {"intermediate_size": 48, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "gemma": {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 8},
    "phi": {"intermediate_size": 48},
}


_SHARED: list[tuple[PreTrainedModel, list[Any]]] = []  # each model that tests share, and what it was at first


def shared(build: Callable[..., PreTrainedModel]) -> Any:
    """Models that tests share and must leave as they are; `__wrapped__` builds one anew."""

    def build_once(*args: Any, **kwargs: Any) -> PreTrainedModel:
        with torch.inference_mode(False):  # whichever test needs it first
            model = build(*args, **kwargs)
        _SHARED.append((model, state(model)))
        return model

    cached: Any = cache(build_once)
    cached.__wrapped__ = build
    return cached


def state(model: PreTrainedModel) -> list[Any]:
    """For each module, whether it is in training mode and whether its forward was replaced."""
    return [(module.training, "forward" in vars(module)) for module in model.modules()]


def changed_models() -> list[str]:
    """The families of shared models that were changed since this was last asked."""
    changed = []
    for model, before in _SHARED:
        if (now := state(model)) != before:
            before[:] = now
            changed.append(model.config.model_type)
    return changed


def tiny_config(model_type: str, **sizes: Any) -> Any:
    """The config of a tiny model, of six layers unless `sizes` name another number."""
    special = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
    usual = {} if "n_layer" in sizes else {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
    return AutoConfig.for_model(model_type, **{**special, **usual, **sizes})


@shared
def tiny_opt(kind: str, num_layers: int, seed: int = 0) -> PreTrainedModel:
    sizes = {"word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 96, "dropout": 0.0}
    return randomised(tiny_config("opt", num_hidden_layers=num_layers, **{**sizes, **OPT_KINDS[kind]}), seed)


@shared
def tiny_family(model_type: str) -> PreTrainedModel:
    return randomised(tiny_config(model_type, **TINY_FAMILIES[model_type]), seed=1)


def randomised(config: Any, seed: int) -> PreTrainedModel:
    """A model in eval mode with weights large enough that greedy decoding doesn't repeat one token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def ragged_prompts(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts padded on the left: ids and mask, each [batch, longest]."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(4, VOCABULARY, (len(lengths), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = PAD
        mask[row, : longest - length] = 0
    return ids, mask
