"""The reference for law 5: OPT with an explicit mask that says which token runs which layer.

Written from the definition, with no cache, no prefixes and nothing of `skipdecode` but the schedule's `layers_at`.
Every layer is computed for every token and then discarded where the token doesn't run it; a token that doesn't run a
layer gives that layer no key and no value, but for those of a prompt that has stopped below it.
"""

import math

import torch
from torch import nn

from skipdecode import SkipSchedule


def tokens_by_layers(schedule: SkipSchedule, prompt_columns: int, columns: int) -> torch.Tensor:
    """[columns, layers] of bool: which column runs which layer."""
    runs = torch.zeros(columns, schedule.num_layers, dtype=torch.bool)
    for column in range(columns):
        on_prompt = schedule.prompt_layers if column < prompt_columns else ()
        if column < prompt_columns - 1:
            on_prompt = on_prompt[: schedule.prompt_stop]
        for layer in on_prompt or schedule.layers_at(column - prompt_columns):
            runs[column, layer] = True
    return runs


def naive_logits(
    model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, prompt_columns: int, schedule: SkipSchedule
) -> torch.Tensor:
    """Logits [batch, columns, vocabulary] of a whole sequence under a schedule; mask is [batch, columns]."""
    decoder = model.model.decoder
    columns = input_ids.shape[1]
    runs = tokens_by_layers(schedule, prompt_columns, columns)
    gives = runs.clone()
    gives[:prompt_columns, schedule.prompt_layers] = True
    positions = (mask.cumsum(1) * mask - 1).long()
    hidden = decoder.embed_tokens(input_ids)
    if decoder.project_in is not None:
        hidden = decoder.project_in(hidden)
    hidden = hidden + nn.functional.embedding(positions + 2, decoder.embed_positions.weight)
    causal = torch.ones(columns, columns, dtype=torch.bool).tril()
    for index, layer in enumerate(decoder.layers):
        visible = causal & gives[:, index] & mask.bool()[:, None, :]  # [batch, queries, keys]
        after = _layer(layer, hidden, visible)
        hidden = torch.where(runs[:, index][None, :, None], after, hidden)
    if decoder.final_layer_norm is not None:
        hidden = decoder.final_layer_norm(hidden)
    if decoder.project_out is not None:
        hidden = decoder.project_out(hidden)
    return model.lm_head(hidden)


def _layer(layer: nn.Module, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    before_norm = layer.do_layer_norm_before
    x = layer.self_attn_layer_norm(hidden) if before_norm else hidden
    hidden = hidden + _attention(layer.self_attn, x, visible)
    if not before_norm:
        hidden = layer.self_attn_layer_norm(hidden)
    x = layer.final_layer_norm(hidden) if before_norm else hidden
    hidden = hidden + layer.fc2(torch.relu(layer.fc1(x)))
    return hidden if before_norm else layer.final_layer_norm(hidden)


def _attention(attention: nn.Module, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    batch, columns, size = x.shape
    heads, width = attention.num_heads, attention.head_dim

    def split(projection: nn.Module) -> torch.Tensor:
        return projection(x).view(batch, columns, heads, width).transpose(1, 2)

    query, key, value = split(attention.q_proj), split(attention.k_proj), split(attention.v_proj)
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    # A padding column may see nothing at all: a finite number keeps its (unused) softmax from being NaN.
    scores = scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, columns, size)
    return attention.out_proj(mixed)


@torch.no_grad()
def naive_greedy(
    model: nn.Module,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    schedule: SkipSchedule,
    new_tokens: int,
    end_token: int,
) -> list[list[int]]:
    """Each row's greedy continuation, up to and with the end token; the whole sequence runs again for every token."""
    prompt_columns = input_ids.shape[1]
    for _ in range(new_tokens):
        logits = naive_logits(model, input_ids, mask, prompt_columns, schedule)
        chosen = logits[:, -1].argmax(-1)
        input_ids = torch.cat([input_ids, chosen[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(chosen)[:, None]], dim=1)
    return [up_to_end(row, end_token) for row in input_ids[:, prompt_columns:].tolist()]


def up_to_end(row: list[int], end_token: int) -> list[int]:
    """Tokens up to and with the first end token."""
    return row[: row.index(end_token) + 1] if end_token in row else row
