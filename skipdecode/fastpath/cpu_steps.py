"""Prefill and decode steps of the fast path by the compiled CPU kernels: the structs that these read and write."""

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, cast, get_args

import torch
from torch import nn

from skipdecode.fastpath.kv_cache import PlannedCache
from skipdecode.fastpath.layer import FastLayer, Norm
from skipdecode.fastpath.prompt_inputs import PromptInputs
from skipdecode.fastpath.sequences import ChosenTokens, DraftedRounds, DraftRule, RunningSequences
from skipdecode.fastpath.step_inputs import PreparedInputs, StepInputs
from skipdecode.kernels.cpu import (
    KINDS,
    MAX_HEAD_DIM,
    BlockStruct,
    DraftsStruct,
    GreedyStruct,
    Kernels,
    LayerStruct,
    NativeLinear,
    NormStruct,
    StepStruct,
    address,
    kernels,
)
from skipdecode.kernels.linear import Linear, Weights, weight_of

ACTIVATIONS = {
    "ReLU": 1,
    "SiLU": 2,
    "SiLUActivation": 2,
    "NewGELUActivation": 3,
    "BloomGelu": 3,
    "GELUTanh": 3,
    "GELUActivation": 4,
}

# The maximum number of tokens in a call: up to here the kernels are faster than torch's operators. With more tokens
# the values between two matrix products no longer fit into a processor's caches, and several calls are faster.
MAX_TOKENS: dict[Any, int] = dict.fromkeys((torch.float32, torch.bfloat16, *get_args(Weights)), 512)
MAX_TOKENS_BFLOAT16 = {"generic": 4}
# For bfloat16 with AMX where the number of inputs is no multiple of 32, so that rows are multiplied one by one.
MAX_TOKENS_WITHOUT_TILES = 16
# Instruction sets without bfloat16 products, whose kernels are faster than torch nevertheless.
BFLOAT16_AS_FLOATS = ("avx512_vnni", "avx2")


class NativeSteps:
    """The prefill and the decode steps of a `FastDecoder` by the compiled kernels.

    Args:
        layers: the model's layers; None for those that can't run.
        head: the LM head; None where something stands between the final norm and it.
        tables: the embeddings of tokens and of positions, where the first layer's input is their sum.

    Attributes:
        embeds: whether calls take token ids; else they take hidden states.
        ends_in_logits: whether calls return logits; else they return hidden states.
        max_tokens: the number of tokens up to which the kernels are faster than torch's operators.
    """

    def __init__(
        self,
        compiled: Kernels,
        layers: Sequence[FastLayer | None],
        final_norm: Norm | None,
        head: NativeLinear | None,
        tables: tuple[torch.Tensor, torch.Tensor | None] | None,
        weights: Weights,
    ) -> None:
        self._kernels = compiled
        self._embedding: torch.Tensor | None = None
        self._position_table: torch.Tensor | None = None
        if tables is not None:
            self._embedding, self._position_table = tables
        self.embeds = tables is not None
        self._alive: list[Any] = []  # the memory that the structs point to
        self._caches: weakref.WeakKeyDictionary[PlannedCache, Any] = weakref.WeakKeyDictionary()
        self._blocks = {n: self._block(layer) for n, layer in enumerate(layers) if layer is not None}
        self._addresses = [ctypes.addressof(self._blocks[n]) if n in self._blocks else None for n in range(len(layers))]
        self._final_norm = self._norm(final_norm)
        self.head = head
        self.ends_in_logits = head is not None
        self._hidden_size = self._blocks[0].out.outputs
        assert layers[0] is not None
        self._dtype = cast(torch.Tensor, layers[0].sources["out"][0].weight).dtype
        kind = self._dtype if weights == "packed" else weights
        self.max_tokens = MAX_TOKENS[kind]
        if kind == torch.bfloat16:
            linears = [linear for block in self._blocks.values() for linear in (block.out, block.up, block.down)]
            without_tiles = compiled.name == "amx" and any(linear.inputs % 32 for linear in linears)
            of_set = MAX_TOKENS_BFLOAT16.get(compiled.name, self.max_tokens)
            self.max_tokens = MAX_TOKENS_WITHOUT_TILES if without_tiles else of_set
        self._in_parts = self.max_tokens == MAX_TOKENS[kind]

    def __call__(
        self, entered: torch.Tensor, layers: Sequence[int], cache: PlannedCache, inputs: StepInputs, **of_prompt: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run tokens through `layers`: ids [tokens] where there are `tables`, else hidden states [tokens, hidden].

        Returns the last layer's output in float32 and None where there is no LM head, else None and logits.
        """
        step, logits, alive = self._step(entered, layers, cache, inputs, **of_prompt)
        _checked(-self._kernels.step(self._kernels.number, step))
        if logits is not None:
            return None, logits
        hidden, last = alive["hidden"], of_prompt.get("last")
        return hidden if last is None else hidden[last], None

    def _step(
        self,
        entered: torch.Tensor,
        layers: Sequence[int],
        cache: PlannedCache,
        inputs: StepInputs,
        last: Sequence[int] | None = None,
        stop: int = 0,
        passing: torch.Tensor | None = None,
        places: tuple[Sequence[int], Sequence[int]] | None = None,
        *,
        chooses: bool = False,
    ) -> tuple[StepStruct, torch.Tensor | None, dict[str, Any]]:
        """The struct of a call, the logits that it writes unless it chooses tokens, and the memory of both."""
        tokens = len(entered)
        places = inputs.rows_and_slots(tokens) if places is None else places
        rows, slots = places
        held: list[Any] = cache.layers
        end = max(slots) + 1
        for index in layers:
            layer = held[index]
            if layer.generated:
                layer.check_room(end)
            layer.length = end if layer.generated else 0
        alive: dict[str, Any] = {
            "layers": self.layer_structs(cache, passing),
            "running": _numbers(tuple(layers)),
            "row": array("i", rows),
            "column": array("i", slots),
        }
        step = StepStruct(
            **{name: _address_of(value) for name, value in alive.items()},
            layer_count=len(layers),
            tokens=tokens,
            hidden_size=self._hidden_size,
            threads=torch.get_num_threads(),
            cache_type=KINDS[self._dtype],
            one_token_a_row=len(set(rows)) == tokens,
        )
        if entered.dim() == 1:
            alive["token_ids"] = token_ids = entered.long().contiguous()
            assert self._embedding is not None
            step.token_ids, step.embedding = token_ids.data_ptr(), self._embedding.data_ptr()
            step.token_count = len(self._embedding)
            if inputs.position_ids is not None:
                alive["position_ids"] = position_ids = inputs.position_ids.long().contiguous()
                assert self._position_table is not None
                step.position_ids, step.positions = position_ids.data_ptr(), self._position_table.data_ptr()
                step.position_count = len(self._position_table)
        if entered.dim() == 2 or self.head is None:
            hidden = torch.empty(tokens, self._hidden_size, dtype=torch.float32)
            if entered.dim() == 2:
                hidden.copy_(entered)
            alive["hidden"] = hidden
            step.hidden = hidden.data_ptr()
        prefixes = inputs.nested_rows(layers)
        if prefixes is not None:
            alive["prefixes"] = prefixes
            step.layer_tokens, step.layer_rows = _address_of(prefixes[0]), prefixes[1].data_ptr()
        alive["rotary"] = _set_rotary(step, inputs.rotary)
        if inputs.bias is not None:
            bias = alive["bias"] = inputs.bias.float().contiguous()  # [batch or 1, heads or 1, 1, slots]
            step.bias = bias.data_ptr()
            step.bias_row_stride = bias.stride(0) if len(bias) > 1 else 0
            step.bias_head_stride = bias.stride(1) if bias.shape[1] > 1 else 0
        if last is not None:
            alive["last"] = array("i", last)
            step.last, step.last_count, step.stop = _address_of(alive["last"]), len(last), stop
        if self.head is None:
            return step, None, alive
        step.head, step.final_norm = ctypes.addressof(self.head.struct), ctypes.addressof(self._final_norm)
        if chooses:
            return step, None, alive
        logits = torch.empty(tokens if last is None else len(last), self.head.struct.outputs, dtype=torch.float32)
        step.logits = logits.data_ptr()
        return step, logits, alive

    def choose(
        self,
        sequences: RunningSequences,
        layers: Sequence[Sequence[int]],
        cache: PlannedCache,
        prepared: PreparedInputs,
    ) -> ChosenTokens:
        """Decode several tokens of each sequence greedily, with `layers` of each step a subset of the step's before."""
        for n, running in enumerate(layers, start=1):
            if n == len(layers) or running is not layers[n]:
                _check_room(cache, running, prepared.prompt_columns + sequences.reach(n))
        step, greedy, chosen, counts, alive = self._greedy(sequences, layers, len(layers), cache, prepared)
        done = self._kernels.greedy(self._kernels.number, step, greedy)
        del alive
        for n in range(_checked(done)):
            if n + 1 == done or layers[n] is not layers[n + 1]:
                self._set_length(cache, layers[n], prepared.prompt_columns + max(sequences.starts) + n + 1)
        return ChosenTokens(chosen[:done].T, list(counts))

    def draft(
        self,
        sequences: RunningSequences,
        layers: Sequence[Sequence[int]],
        all_layers: Sequence[int],
        cache: PlannedCache,
        prepared: PreparedInputs,
        rule: DraftRule,
        rounds: int,
        drafter: "NativeSteps",
    ) -> DraftedRounds:
        """Decode greedily by rounds of drafts from some layers, which all layers verify.

        Args:
            layers: those that run for each draft of a round.
            rounds: the maximum number of rounds.
            drafter: runs the drafts, for the same model.
        """
        assert drafter.head is not None
        count, steps = len(sequences.tokens), len(layers)
        new_tokens = min(max(sequences.max_tokens), rounds * (steps + 1))
        _check_room(cache, all_layers, prepared.prompt_columns + sequences.reach(new_tokens))
        step, greedy, chosen, counts, alive = self._greedy(sequences, layers, new_tokens, cache, prepared)
        drafted, accepted = (array("i", [-1] * rounds * count) for _ in range(2))
        probabilities = torch.empty(rounds, steps, count, dtype=torch.float32)
        of_rule = {"worth": rule.min_probabilities, "bounds": rule.bounds, "shares": rule.acceptance_rates}
        arrays = {name: array("f", values) for name, values in of_rule.items()}
        all_running = _numbers(tuple(all_layers))
        drafts = DraftsStruct(
            layers=ctypes.addressof(drafter.layer_structs(cache, None)),
            head=ctypes.addressof(drafter.head.struct),
            all_running=_address_of(all_running),
            probabilities=probabilities.data_ptr(),
            drafted=_address_of(drafted),
            agreed=_address_of(accepted),
            all_count=len(all_layers),
            kinds=len(rule.bounds),
            rounds=rounds,
            **{name: _address_of(values) for name, values in arrays.items()},
        )
        done = _checked(self._kernels.lossless(self._kernels.number, step, greedy, drafts))
        del alive
        self._set_length(cache, all_layers, prepared.prompt_columns + max(sequences.starts) + done)
        parts = [
            [each[n : n + count] for n in range(0, len(each), count)] for each in (drafted.tolist(), accepted.tolist())
        ]
        ran = sum(any(count >= 0 for count in of_round) for of_round in parts[1])
        found = ChosenTokens(chosen[:done].T, list(counts))
        return DraftedRounds(found, parts[0][:ran], parts[1][:ran], probabilities[:ran].tolist())

    def _greedy(
        self,
        sequences: RunningSequences,
        layers: Sequence[Sequence[int]],
        tokens: int,
        cache: PlannedCache,
        prepared: PreparedInputs,
    ) -> tuple[StepStruct, GreedyStruct, torch.Tensor, "array[int]", list[Any]]:
        """The structs of a call, the tokens [tokens, sequences] and counts that it writes, and what they point to."""
        slots = [prepared.prompt_columns + start for start in sequences.starts]
        position_ids, rotary = prepared.of_sequences(sequences.rows, sequences.starts, tokens)
        inputs = StepInputs(slots[0], position_ids, None, prepared.bias)
        places = (sequences.rows, slots)
        step, _, alive = self._step(sequences.tokens, layers[0], cache, inputs, places=places, chooses=True)
        alive["rotary"] = _set_rotary(step, rotary)
        chosen = torch.empty(tokens, len(sequences.tokens), dtype=torch.int64)
        counts = array("i", [0] * len(sequences.tokens))
        running = [_numbers(tuple(each)) for each in layers]
        arrays = {
            "running": array("Q", map(_address_of, running)),
            "layer_counts": array("i", map(len, layers)),
            "ends": array("q", sequences.ends),
            "most": array("i", sequences.max_tokens),
        }
        greedy = GreedyStruct(
            position_ids=step.position_ids,
            rotary_token=alive["rotary"][0].stride(0) if rotary is not None else 0,
            chosen=chosen.data_ptr(),
            counts=_address_of(counts),
            steps=len(layers),
            end_count=len(sequences.ends),
            **{name: _address_of(values) for name, values in arrays.items()},
        )
        return step, greedy, chosen, counts, [alive, running, arrays]

    def _set_length(self, cache: PlannedCache, layers: Sequence[int], length: int) -> None:
        held: list[Any] = cache.layers
        for index in layers:
            held[index].length = length

    def prefill(
        self, entered: torch.Tensor, layers: Sequence[int], cache: PlannedCache, inputs: PromptInputs, stop: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run a prompt through `layers` and fill the cache. Returns what a step does, for each sequence's last token.

        Above the first `stop` layers only the last tokens run; keys and values of the others come from the states that
        these layers left. Sequences run together as long as they have up to `max_tokens` tokens.
        """
        held: list[Any] = cache.layers
        block = self._blocks[0]
        one = torch.empty(1, dtype=self._dtype)
        like = one.expand(inputs.batch, block.kv_heads, inputs.width, block.head_dim)
        kept = [held[index] for index in layers if held[index].generated]
        for layer in kept:
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
            if inputs.shown is not None:  # padding is attended to with weight 0: it must not hold NaN
                for buffer in layer.buffers:
                    buffer[:, :, : inputs.slot].zero_()
        passing = torch.zeros(2, *like.shape, dtype=self._dtype) if len(kept) < len(layers) else None
        places = inputs.rows_and_slots(len(entered))
        hidden: list[torch.Tensor | None] = []
        logits: list[torch.Tensor | None] = []
        first, ends = 0, [end + 1 for end in inputs.last.tolist()]
        while first < len(entered):
            fitting = [end for end in ends if first < end <= first + self.max_tokens]
            part = slice(first, fitting[-1])
            found = self(
                entered[part],
                layers,
                cache,
                inputs.part(part),
                last=[end - 1 - first for end in fitting],
                stop=stop,
                passing=passing,
                places=(places[0][part], places[1][part]),
            )
            for parts, new in zip((hidden, logits), found, strict=True):
                parts.append(new)
            first = part.stop
        return _joined(hidden), _joined(logits)

    def takes_prompt(self, inputs: PromptInputs) -> bool:
        """Whether the kernels are faster than torch's operators for a prompt."""
        ends = inputs.last.tolist()
        if ends[-1] < self.max_tokens:
            return True
        longest = max(end - before for before, end in zip([-1, *ends], ends, strict=False))
        return self._in_parts and longest <= self.max_tokens

    def layer_structs(self, cache: PlannedCache, passing: torch.Tensor | None) -> Any:
        """The structs of all layers with the addresses of their keys and values, which a cache allocates once.

        `passing` [2, batch, heads, slots, head_dim] is memory for keys and values that only the prompt attends to.
        """
        known = self._caches.get(cache)
        if known is not None and passing is None:
            return known
        structs = _layer_structs(len(cache.layers))()
        held: list[Any] = cache.layers
        for struct, block, layer in zip(structs, self._addresses, held, strict=True):
            kept = layer.buffers if layer.is_initialized else passing
            if kept is None or block is None:
                continue  # the layer doesn't run with this cache
            keys, values = kept
            struct.block, struct.keys, struct.values = block, keys.data_ptr(), values.data_ptr()
            struct.row_stride, struct.head_stride = keys.stride(0), keys.stride(1)
        if passing is None:
            self._caches[cache] = structs
        return structs

    def _norm(self, norm: Norm | None) -> NormStruct:
        if norm is None:
            return NormStruct()
        parts = (norm.weight, norm.bias)
        weight, bias = (None if part is None else part.detach().float().contiguous() for part in parts)
        self._alive += [weight, bias]
        return NormStruct(address(weight), address(bias), norm.eps, 1 if norm.centred else 2)

    def _linears(self, linear: Linear | None, sources: Sequence[nn.Module]) -> list[NativeLinear]:
        """The projection itself where it is a NativeLinear, else one of the model's own weights."""
        found = [linear] if isinstance(linear, NativeLinear) else [native_linear(source) for source in sources]
        self._alive += found
        return found

    def _block(self, layer: FastLayer) -> BlockStruct:
        struct = BlockStruct(
            attention_norm=self._norm(layer.attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            interleaved=layer.interleaved,
            window=layer.window or 0,
            activation=ACTIVATIONS[layer.activation_name],
            parallel=bool(layer.parallel),
            norm_first=layer.norm_first,
            scaling=layer.scaling,
        )
        for name, sources in layer.sources.items():
            linears = self._linears(getattr(layer, name), sources)
            if name == "qkv":
                struct.projections = len(linears)
                for n, linear in enumerate(linears):
                    struct.qkv[n] = linear.struct
            elif linears:
                setattr(struct, name, linears[0].struct)
        return struct


def native_steps(
    layers: Sequence[FastLayer | None],
    final_norm: Norm | None,
    head: tuple[Linear, nn.Module] | None,
    tables: tuple[torch.Tensor, torch.Tensor | None] | None,
    weights: Weights,
) -> NativeSteps | None:
    """A model's steps by the kernels; None where these weren't built or don't support the model's layers.

    The arguments are those of NativeSteps, except that `head` comes with its module.
    """
    compiled = kernels() if weights != "model" else None
    if compiled is None or not all(_supported(layer) for layer in layers if layer is not None):
        return None
    if tables is not None and not all(table is None or table.is_contiguous() for table in tables):
        tables = None  # a slice of a wider table, for instance: torch looks embeddings up
    last = None
    if head is not None:
        last = head[0] if isinstance(head[0], NativeLinear) else native_linear(head[1])
    return NativeSteps(compiled, layers, final_norm, last, tables, weights)


def _checked(returned: int) -> int:
    """The number of tokens that a call of the kernels ran. Raises IndexError, as torch does, for an id out of range."""
    if returned < 0:
        raise IndexError("a token or a position is not in the model's table of embeddings")
    return returned


def _check_room(cache: PlannedCache, layers: Sequence[int], length: int) -> None:
    held: list[Any] = cache.layers
    for index in layers:
        held[index].check_room(length)


@functools.cache
def _layer_structs(count: int) -> Any:
    """An array type of LayerStruct; it is kept, as each ctypes type is a cycle that the garbage collector must find."""
    return LayerStruct * count


@functools.lru_cache(maxsize=1024)
def _numbers(layers: tuple[int, ...]) -> "array[int]":
    """The numbers of layers as the kernels take them."""
    return array("i", layers)


def _address_of(held: Any) -> int:
    """The address of an array's values, or of a ctypes object."""
    return held.buffer_info()[0] if isinstance(held, array) else ctypes.addressof(held)


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The rows of all parts; None where there are none."""
    found = [part for part in parts if part is not None]
    return (found[0] if len(found) == 1 else torch.cat(found)) if found else None


def _set_rotary(step: StepStruct, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor]:
    """Set cosines and sines [..., tokens or 1, 1, rotated dimensions] in the struct of a step. Returns their memory."""
    if rotary is None:
        return []
    cos, sin = found = [part.squeeze(-2).float().contiguous() for part in rotary]
    step.cos, step.sin, step.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
    step.rotary_stride = cos.shape[-1] if cos.shape[-2] > 1 else 0
    return found


def native_linear(module: Any) -> NativeLinear:
    """A projection with the model's own weights, or a copy of them in the kernels' layout."""
    return NativeLinear(weight_of(module), module.bias)


def _supported(layer: FastLayer) -> bool:
    weight = cast(torch.Tensor, layer.sources["out"][0].weight)
    return (
        weight.device.type == "cpu"
        and weight.dtype in KINDS
        and layer.head_dim <= MAX_HEAD_DIM
        and layer.activation_name in ACTIVATIONS
    )
