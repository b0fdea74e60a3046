"""One decoder layer, for one token a row or for the columns of a prompt: a family's names as a dozen operations."""

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from skipdecode.families import BlockParts
from skipdecode.fastpath.kv_cache import PlannedLayer
from skipdecode.kernels.linear import Linear, project_apart, project_together, sizes


class StepInputs:
    """Inputs of a decode step beside its tokens: their positions, and the columns that they attend to.

    Attributes:
        column: of the tokens, in the cache.
        position_ids: of the rows' tokens [batch], for a model that looks them up.
        rotary: cosines and signed sines [batch or 1, 1, rotated dimensions], for a model that rotates.
        bias: added to attention scores [batch, 1 or heads, 1, columns], or None where every column counts.
    """

    __slots__ = ("bias", "column", "position_ids", "rotary")

    def __init__(
        self,
        column: int,
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        self.column = column
        self.position_ids = position_ids
        self.rotary = rotary
        self.bias = bias

    def update_cache(
        self, layer: PlannedLayer, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Write this token's key and value [batch, heads, head_dim]; returns all to attend to, and their bias."""
        keys: Any = layer.keys
        values: Any = layer.values
        end = self.column + 1
        keys[:, :, self.column] = key
        values[:, :, self.column] = value
        layer.length = end
        start = 0 if window is None else max(0, end - window)
        bias = self.bias[..., start:end] if self.bias is not None else None
        return keys[:, :, start:end], values[:, :, start:end], bias

    def attend(
        self, block: "LeanBlock", cached: PlannedLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of each row's `query` to what is cached and its own `key` and `value`, [rows, heads, head_dim] all.

        Returns [rows, heads * head_dim].
        """
        keys, values, bias = self.update_cache(cached, key, value, block.window)
        # Heads that share keys stand where a sequence's queries would: no key or value is repeated.
        grouped = query.view(len(query), block.kv_heads, -1, block.head_dim)
        attended = block.attention_function(grouped, keys, values, attn_mask=bias, scale=block.scaling)
        return attended.reshape(len(query), -1)

    def places(self, tokens: int) -> tuple[Sequence[int], Sequence[int]] | None:
        """For each of the step's tokens its row of the cache and its column, where they are known beforehand."""
        return range(tokens), [self.column] * tokens

    def prefixes(self, layers: Sequence[int]) -> "tuple[array[int], torch.Tensor] | None":
        """For each of `layers`, how many of the first tokens run it, and their rows [layers, tokens] of the cache;
        None where all do, in the rows that `places` says.
        """
        return None

    def run(self, block: "LeanBlock", index: int, hidden: torch.Tensor, cached: PlannedLayer) -> torch.Tensor:
        """Run layer `index`, which is `block`, on the tokens of `hidden` [rows, hidden] that run it."""
        return block(hidden, cached, self)

    def by_rows(self, function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """A function that treats each row of its arguments [rows, ...] by itself."""
        return function(*rows)


class PreparedInputs:
    """The inputs of all decode steps after a prompt: a function from a step's number to its StepInputs.

    Attributes:
        prompt_columns: of the prompt.
        position_ids: as in StepInputs, of every step [steps, batch].
        rotary: as in StepInputs, of every step [batch or 1, steps, 1, rotated dimensions].
        bias: as in StepInputs, of all columns; of one row where all share it.
    """

    def __init__(
        self,
        prompt_columns: int,
        position_ids: torch.Tensor | None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        bias: torch.Tensor | None,
    ) -> None:
        self.prompt_columns = prompt_columns
        self.position_ids = position_ids
        self.rotary = rotary
        self.bias = bias

    def __call__(self, i: int) -> StepInputs:
        position_ids = self.position_ids[i] if self.position_ids is not None else None
        rotary = (self.rotary[0][:, i], self.rotary[1][:, i]) if self.rotary is not None else None
        return StepInputs(self.prompt_columns + i, position_ids, rotary, self.bias)

    def of_tokens(
        self, rows: list[int], steps: list[int]
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """Position ids [tokens] and rotary [tokens, 1, rotated dimensions] of rows' tokens at steps of their own."""
        position_ids = self.position_ids[steps, rows] if self.position_ids is not None else None
        if self.rotary is None:
            return position_ids, None
        rows = rows if len(self.rotary[0]) > 1 else [0] * len(rows)
        return position_ids, (self.rotary[0][rows, steps], self.rotary[1][rows, steps])

    def of_texts(
        self, rows: Sequence[int], starts: Sequence[int], steps: int
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """Position ids [steps, texts] and rotary [steps, texts or 1, 1, rotated dimensions] of so many steps of texts.

        Each has its row and the number of its first step.
        """
        together = len(set(starts)) == 1

        def look_up(table: torch.Tensor) -> torch.Tensor:  # [steps, batch or 1, ...]; no text runs beyond the last
            batch = table.shape[1]
            if together and (batch == 1 or list(rows) == list(range(batch))):
                return table[starts[0] : starts[0] + steps]
            numbers = torch.tensor(starts) + torch.arange(steps)[:, None]
            return table[numbers.clamp(max=len(table) - 1), torch.tensor(rows) if batch > 1 else 0]

        position_ids = look_up(self.position_ids) if self.position_ids is not None else None
        if self.rotary is None:
            return position_ids, None
        cos, sin = (look_up(part.transpose(0, 1)) for part in self.rotary)
        return position_ids, (cos, sin)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Prepare for `rows` alone from now on, in their order."""
        kept = list(rows)
        if self.position_ids is not None:
            self.position_ids = self.position_ids[:, kept]
        if self.rotary is not None and len(self.rotary[0]) > 1:
            self.rotary = (self.rotary[0][kept], self.rotary[1][kept])
        if self.bias is not None and len(self.bias) > 1:
            self.bias = self.bias[kept]


class LeanBlock:
    """One decoder layer. Rows are tokens: one of each text in a decode step, all columns of a prompt."""

    def __init__(self, layer: nn.Module, parts: BlockParts, config: Any, make_linear: Callable[..., Linear]) -> None:
        attention: Any = layer.get_submodule(parts.attention)
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        projections = [getattr(attention, name) for name in parts.qkv]
        # What the compiled kernels are made of, by the names of their struct (`skipdecode.kernels.cpu`).
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

    def __call__(self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs) -> torch.Tensor:
        """Run the layer on `hidden` [rows, hidden]."""
        normed = self.attention_norm(hidden) if self.norm_first else hidden
        return inputs.by_rows(self.finish, hidden, normed, self.attend(normed, cached, inputs))

    def run_last(
        self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs, last: torch.Tensor
    ) -> torch.Tensor:
        """The same for the rows `last`, of which alone `inputs` takes queries."""
        normed = self.attention_norm(hidden) if self.norm_first else hidden
        return self.finish(hidden[last], normed[last], self.attend_last(normed, cached, inputs, last))

    def attend_last(
        self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs, last: torch.Tensor
    ) -> torch.Tensor:
        """The attention of the rows `last`; keys and values are made of all."""
        if self.apart is None:
            query, key, value = self.parts_of(inputs.by_rows(self.project, hidden), inputs.rotary)
            return inputs.attend(self, cached, query[last], key, value)
        project_query, project_rest = self.apart
        query = project_query(hidden[last]).view(len(last), -1, self.head_dim)
        key, value = inputs.by_rows(project_rest, hidden).view(len(hidden), 2, -1, self.head_dim).unbind(1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if inputs.rotary is not None:
            query, key = rotate(query, *(part[last] for part in inputs.rotary)), rotate(key, *inputs.rotary)
        return inputs.attend(self, cached, query, key, value)

    def attend(self, hidden: torch.Tensor, cached: PlannedLayer, inputs: StepInputs) -> torch.Tensor:
        """The attention of `hidden` [rows, hidden], up to its output projection: [rows, heads * head_dim]."""
        return inputs.attend(self, cached, *self.parts_of(inputs.by_rows(self.project, hidden), inputs.rotary))

    def parts_of(
        self, all_heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [rows, heads, head_dim], normed and rotated, of those that `project` gave."""
        rotated = self.heads + self.kv_heads
        query_key, value = all_heads[:, :rotated], all_heads[:, rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key[:, : self.heads], query_key[:, self.heads :]
            query_key = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if rotary is not None:
            query_key = rotate(query_key, *rotary)
        return query_key[:, : self.heads], query_key[:, self.heads :], value

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of `hidden` [rows, hidden]: [rows, heads + 2 * kv_heads, head_dim]."""
        rows = hidden.shape[0]
        if not self.interleaved:
            return self.qkv(hidden).view(rows, -1, self.head_dim)
        by_head = self.qkv(hidden).view(rows, self.heads, 3, self.head_dim)
        return by_head.transpose(1, 2).reshape(rows, 3 * self.heads, self.head_dim)

    def finish(self, hidden: torch.Tensor, normed: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, from its input, what its attention read and what that gave, row by row."""
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
        """The feed-forward half, without norm and residual."""
        if self.gate is None:
            return self.down(self.activation(self.up(hidden)))
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


class Norm:
    """A LayerNorm or RMSNorm as one operation.

    Attributes:
        weight, bias: [hidden], or None.
        eps: added to the variance or the mean square.
        centred: whether the mean is taken out first: a LayerNorm.
    """

    def __init__(self, module: Any) -> None:
        self.centred = isinstance(module, nn.LayerNorm)
        self.weight: torch.Tensor | None = module.weight
        self.bias: torch.Tensor | None = module.bias if self.centred else None
        if not self.centred:
            # Gemma's is centred on one. Each family has its own class, all with the formula of Llama's.
            weight = module.weight.detach()
            self.weight = weight + 1 if type(module).__name__.startswith("Gemma") else weight
        self.eps: float = getattr(module, "variance_epsilon", None) or module.eps
        self._shape: Any = module.normalized_shape if self.centred else module.weight.shape

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.centred:
            return F.layer_norm(hidden, self._shape, self.weight, self.bias, self.eps)
        return F.rms_norm(hidden, self._shape, self.weight, self.eps)


def _activation(module: nn.Module) -> Linear:
    """The activation as one operation where torch has one."""
    fast: dict[str, Linear] = {
        "ReLU": torch.relu,
        "NewGELUActivation": functools.partial(F.gelu, approximate="tanh"),
        "BloomGelu": functools.partial(F.gelu, approximate="tanh"),
    }
    return fast.get(type(module).__name__, module)


def _window(attention: nn.Module, config: Any) -> int | None:
    """The number of columns that a layer attends to, the token's own included; None for all."""
    everywhere = ["sliding_attention"] * config.num_hidden_layers if config.model_type == "mistral" else None
    kinds = getattr(config, "layer_types", None) or everywhere
    index: Any = attention.layer_idx
    sliding = kinds is not None and kinds[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None


def _attend_on_cpu(
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
    scores = torch.bmm(flat_keys, (query * scale).flatten(0, 1).transpose(1, 2)).transpose(1, 2)
    if attn_mask is not None:
        scores = (scores.view(batch, heads, queries, -1) + attn_mask).view(batch * heads, queries, -1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(shares, flat_values).view(batch, heads, queries, head_dim)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021) of [batch, heads, head_dim], of the first dimensions where few rotate.

    The half of the dimensions that is rolled in comes with its sign in `signed_sin`.
    """
    rotated = cos.shape[-1]
    if rotated == heads.shape[-1]:
        return torch.addcmul(heads * cos, heads.roll(rotated // 2, dims=-1), signed_sin)
    first, rest = heads[..., :rotated], heads[..., rotated:]
    return torch.cat([rotate(first, cos, signed_sin), rest], dim=-1)
