"""Tiny random models whose greedy texts vary, and ragged prompts for them."""

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


@cache
def tiny_opt(kind: str, num_layers: int, seed: int = 0) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "opt",
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": num_layers,
            "ffn_dim": 48,
            "num_attention_heads": 4,
            "max_position_embeddings": 96,
            "pad_token_id": PAD,
            "bos_token_id": END,
            "eos_token_id": END,
            "dropout": 0.0,
            **OPT_KINDS[kind],
        },
    )
    return randomised(config, seed)


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
