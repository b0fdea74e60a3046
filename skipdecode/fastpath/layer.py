"""One decoder layer of the fast path: a family's names turned into a dozen operations.

Rows are tokens: one of each sequence in a decode step, all tokens of a prompt in the prefill.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from skipdecode.families import BlockParts
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.fastpath.step_inputs import StepInputs
from skipdecode.kernels.linear import Linear, project_apart, project_together, sizes

# Rows that a CPU computes together: what lies between two projections then stays in its caches.
ROWS_TOGETHER = 512


class FastLayer:
    """One decoder layer of the model; `make_linear` makes each projection, with its own weights or a copy of them."""

    def __init__(self, layer: nn.Module, parts: BlockParts, config: Any, make_linear: Callable[..., Linear]) -> None:
        attention: Any = layer.get_submodule(parts.attention)
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        projections = [getattr(attention, name) for name in parts.qkv]
        # The modules that the compiled kernels read, by the names of their struct (`skipdecode.kernels.cpu`).
        self.sources = {"qkv": projections}
        for name in ("out", "gate", "up", "down"):
            path = getattr(parts, name)
            self.sources[name] = [layer.get_submodule(path)] if path else []
        on_cpu = projections[0].weight.device.type == "cpu"
        outputs = sum(sizes(projection)[1] for projection in projections)
        self.head_dim = outputs // (self.heads + 2 * self.kv_heads)
        scaling = getattr(attention, "scaling", None)
        self.scaling = scaling if scaling is not None else self.head_dim**-0.5
        self.window = _window(attention, config)
        self.attention_function = _attend_on_cpu if on_cpu else F.scaled_dot_product_attention
        self.interleaved = parts.interleaved
        self.qkv = project_together(projections, make_linear)
        queries = self.heads * self.head_dim
        self.apart = None if self.interleaved else project_apart(projections, make_linear, queries)
        self.query_norm = Norm(getattr(attention, parts.query_norm)) if parts.query_norm else None
        self.key_norm = Norm(getattr(attention, parts.key_norm)) if parts.key_norm else None
        self.out = make_linear(*self.sources["out"])
        self.attention_norm = Norm(layer.get_submodule(parts.attention_norm))
        self.mlp_norm = Norm(layer.get_submodule(parts.mlp_norm)) if parts.mlp_norm else None
        self.up = make_linear(*self.sources["up"])
        self.gate = make_linear(*self.sources["gate"]) if parts.gate else None
        self.down = make_linear(*self.sources["down"])
        self.activation_name = type(layer.get_submodule(parts.activation)).__name__
        self.activation = _activation(layer.get_submodule(parts.activation))
        self.parallel = getattr(layer, parts.parallel) if isinstance(parts.parallel, str) else parts.parallel
        self.norm_first = getattr(layer, "do_layer_norm_before", True)  # opt-350m normalises after each half

    def __call__(
        self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the layer on `hidden` [rows, hidden] and write the keys and values of all rows into the cache.

        Args:
            last: the numbers of the rows whose output is wanted, of which alone `inputs` takes queries; None for all.

        Returns:
            The output of all rows, or of the rows `last`, [rows, hidden].
        """
        normed = self.attention_norm(hidden) if self.norm_first else hidden
        if last is None:
            query, key, value = self.project(normed, inputs.rotary)
        else:
            query, key, value = self.project_last(normed, inputs.rotary, last)
            hidden, normed = hidden[last], normed[last]
        if inputs.attends:
            attended = inputs.attend(self, cached, query, key, value, None)
            return by_rows(self.finish, hidden, normed, attended)
        keys, values = inputs.store(cached, key, value, self.window)
        query = inputs.lay_out(query, self.kv_heads)
        mask = inputs.mask(query, keys, self.window)
        attend = _attend_at_all_positions if inputs.many_queries else self.attention_function
        attended = inputs.take_back(attend(query, keys, values, attn_mask=mask, scale=self.scaling))
        return by_rows(self.finish, hidden, normed, attended)

    def project(
        self, normed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of `normed` [rows, hidden], rotated: [rows, heads, head_dim] each."""
        all_heads = by_rows(self._all_heads, normed)
        rotated = self.heads + self.kv_heads
        query_key, value = all_heads[:, :rotated], all_heads[:, rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key[:, : self.heads], query_key[:, self.heads :]
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if rotary is not None:
            query_key = rotate(query_key, *rotary)
        return query_key[:, : self.heads], query_key[:, self.heads :], value

    def project_last(
        self, normed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `project`, with queries of the rows `last` only; keys and values are of all rows."""
        if self.apart is None:
            query, key, value = self.project(normed, rotary)
            return query[last], key, value
        project_query, project_rest = self.apart
        query = project_query(normed[last]).view(len(last), -1, self.head_dim)
        key, value = by_rows(project_rest, normed).view(len(normed), 2, -1, self.head_dim).unbind(1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, *(part[last] for part in rotary)), rotate(key, *rotary)
        return query, key, value

    def _all_heads(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, heads + 2 * kv_heads, head_dim]: queries, then keys, then values."""
        rows = len(normed)
        if not self.interleaved:
            return self.qkv(normed).view(rows, -1, self.head_dim)
        by_head = self.qkv(normed).view(rows, self.heads, 3, self.head_dim)
        return by_head.transpose(1, 2).reshape(rows, 3 * self.heads, self.head_dim)

    def finish(self, hidden: torch.Tensor, normed: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The output projection, the feed-forward network and what the family adds and normalises around them.

        They get the layer's input and what its attention read [rows, hidden] and returned [rows, heads * head_dim].
        """
        attended = self.out(attended)
        if not self.norm_first:
            assert self.mlp_norm is not None
            hidden = self.attention_norm(hidden + attended)
            return self.mlp_norm(hidden + self.feed_forward(hidden))
        if self.parallel:
            return hidden + attended + self.feed_forward(self.mlp_norm(hidden) if self.mlp_norm else normed)
        assert self.mlp_norm is not None
        hidden = hidden + attended
        return hidden + self.feed_forward(self.mlp_norm(hidden))

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The feed-forward network, without its norm and the residual connection."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


def by_rows(function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """Apply a function that treats each row of its arguments [rows, ...] by itself, on CPU some hundred at a time."""
    if len(rows[0]) <= ROWS_TOGETHER or rows[0].device.type != "cpu":
        return function(*rows)
    parts = -(-len(rows[0]) // ROWS_TOGETHER)
    return torch.cat([function(*part) for part in zip(*(each.chunk(parts) for each in rows), strict=True)])


class Norm:
    """A LayerNorm or RMSNorm as one operation; a LayerNorm is `centred`: it subtracts the mean first."""

    def __init__(self, module: Any) -> None:
        self.centred = isinstance(module, nn.LayerNorm)
        self.weight: torch.Tensor | None = module.weight
        self.bias: torch.Tensor | None = module.bias if self.centred else None
        if not self.centred:
            # Gemma's weights are stored less 1. Every family has its own class, all with the formula of Llama's.
            weight = module.weight.detach()
            self.weight = weight + 1 if type(module).__name__.startswith("Gemma") else weight
        self.eps: float = getattr(module, "variance_epsilon", None) or module.eps
        self._shape: Any = module.normalized_shape if self.centred else module.weight.shape

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.centred:
            return F.layer_norm(hidden, self._shape, self.weight, self.bias, self.eps)
        return F.rms_norm(hidden, self._shape, self.weight, self.eps)


def _activation(module: nn.Module) -> Linear:
    """The activation, as one operation where torch has one."""
    fast: dict[str, Linear] = {
        "ReLU": torch.relu,
        "NewGELUActivation": functools.partial(F.gelu, approximate="tanh"),
        "BloomGelu": functools.partial(F.gelu, approximate="tanh"),
    }
    return fast.get(type(module).__name__, module)


def _window(attention: nn.Module, config: Any) -> int | None:
    """The size of a layer's sliding window in slots, the token's own included; None where it has none."""
    everywhere = ["sliding_attention"] * config.num_hidden_layers if config.model_type == "mistral" else None
    kinds = getattr(config, "layer_types", None) or everywhere
    index: Any = attention.layer_idx
    sliding = kinds is not None and kinds[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None


def _attend_at_all_positions(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, attn_mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of every position of a prompt [batch, heads, positions, head_dim], causal where there is no mask."""
    shared = query.shape[1] // keys.shape[1]
    if shared > 1:
        keys, values = (part.repeat_interleave(shared, dim=1) for part in (keys, values))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=attn_mask, is_causal=attn_mask is None, scale=scale
    )


def _attend_on_cpu(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, attn_mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`scaled_dot_product_attention` for few queries: torch's CPU kernels are made for many.

    Query [batch, heads, queries, head_dim], keys and values [batch, heads, slots, head_dim]; the mask is added to
    scores, broadcast against [batch, heads, queries, slots].
    """
    batch, heads, queries, head_dim = query.shape
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)  # [batch * heads, slots, head_dim], not copied
    # Keys times queries, not queries times keys: with keys on the right each call would transpose all of them.
    scores = torch.bmm(flat_keys, (query * scale).flatten(0, 1).transpose(1, 2)).transpose(1, 2)
    if attn_mask is not None:
        scores = (scores.view(batch, heads, queries, -1) + attn_mask).view(batch * heads, queries, -1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(shares, flat_values).view(batch, heads, queries, head_dim)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) of heads [rows, heads, head_dim].

    Args:
        cos: [rows or 1, 1, rotated dimensions]; dimensions beyond these stay as they are.
        signed_sin: sines of the same shape, negative in their first half, which takes the place of a negation.
    """
    rotated = cos.shape[-1]
    if rotated == heads.shape[-1]:
        return torch.addcmul(heads * cos, heads.roll(rotated // 2, dims=-1), signed_sin)
    first, rest = heads[..., :rotated], heads[..., rotated:]
    return torch.cat([rotate(first, cos, signed_sin), rest], dim=-1)
