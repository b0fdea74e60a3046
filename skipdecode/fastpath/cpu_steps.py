"""The decode steps of a lean decoder by the compiled kernels: their structs of a model, a step and its cache."""

import ctypes
import functools
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import nn

from skipdecode.fastpath.kv_cache import PlannedCache
from skipdecode.fastpath.layer import FastLayer, Norm
from skipdecode.fastpath.prompt_inputs import PromptInputs
from skipdecode.fastpath.step_inputs import PreparedInputs, StepInputs
from skipdecode.kernels.cpu import (
    KINDS,
    MOST_HEAD_DIM,
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

# The most tokens of a call for which the kernels are ahead of torch's operators. Of more, what stands between two
# products no longer fits into a processor's caches: several calls are ahead then.
MOST_TOKENS: dict[Any, int] = dict.fromkeys((torch.float32, torch.bfloat16, *get_args(Weights)), 512)
MOST_OF_BFLOAT16 = {"generic": 4}
MOST_WITHOUT_TILES = 16  # of bfloat16 on AMX where inputs aren't whole tiles of 32, and rows are multiplied one by one
BFLOAT16_AS_FLOATS = ("avx512_vnni", "avx2")  # sets without products of bfloat16 that are ahead of torch even so


def kind_of(bounds: Sequence[float], probability: float) -> int:
    """The place of the first of rising bounds that a probability isn't beyond; of the last where there is none."""
    return min(bisect_left(bounds, probability), len(bounds) - 1)


class DraftRule(NamedTuple):
    """What stops drafting a text's next tokens.

    Attributes:
        worth: for each draft, how likely those before it must all be taken for it to be made: likelier than that.
        bounds: probabilities, rising to 1.
        shares: how likely drafts are taken whose probability is up to each of them.
    """

    worth: Sequence[float]
    bounds: Sequence[float]
    shares: Sequence[float]

    def share(self, probability: float) -> float:
        """How likely a draft of such a probability is taken."""
        return self.shares[kind_of(self.bounds, probability)]


class TextsAtHand(NamedTuple):
    """Texts that go on from a token each.

    Attributes:
        tokens: [texts], which haven't run yet.
        rows: of the cache, one for each text.
        starts: the number of each text's token among its generated ones.
        most: tokens that each may grow by.
        ends: tokens behind which a text has no more.
    """

    tokens: torch.Tensor
    rows: Sequence[int]
    starts: Sequence[int]
    most: Sequence[int]
    ends: Collection[int]

    def reach(self, steps: int) -> int:
        """Columns of generated tokens that the longest text has run after so many steps."""
        return max(start + min(steps, most) for start, most in zip(self.starts, self.most, strict=True))


class ChosenTokens(NamedTuple):
    """Tokens that were chosen one after another.

    Attributes:
        tokens: [texts, steps].
        counts: how many of each text there are; what stands behind them means nothing.
    """

    tokens: torch.Tensor
    counts: list[int]


class DraftedRounds(NamedTuple):
    """Tokens of full depth, and the rounds of drafts that gave them.

    Attributes:
        chosen: the tokens.
        drafted: of each round and text, drafts.
        agreed: those of them that full depth chose too; -1 where the text had ended before.
        probabilities: of the drafts, [rounds, drafts, texts].
    """

    chosen: ChosenTokens
    drafted: list[list[int]]
    agreed: list[list[int]]
    probabilities: list[list[list[float]]]


class NativeSteps:
    """The decode steps of a `FastDecoder` by the kernels.

    Args:
        compiled: the kernels.
        blocks: the model's layers; None for those that can't be run.
        final_norm: of the model, or None.
        head: the model's head; None where something stands between norm and head.
        tables: of tokens and of positions, where their rows' sum is what the first layer takes.
        weights: their kind.

    Attributes:
        embeds: whether tokens are given, and not their hidden states.
        ends_in_logits: whether a head comes last.
        head: that one.
        most_tokens: for which the kernels are ahead of torch's operators.
    """

    def __init__(
        self,
        compiled: Kernels,
        blocks: Sequence[FastLayer | None],
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
        self._alive: list[Any] = []  # what the structs point to
        self._caches: weakref.WeakKeyDictionary[PlannedCache, Any] = weakref.WeakKeyDictionary()
        self._blocks = {n: self._block(block) for n, block in enumerate(blocks) if block is not None}
        self._addresses = [ctypes.addressof(self._blocks[n]) if n in self._blocks else None for n in range(len(blocks))]
        self._final_norm = self._norm(final_norm)
        self.head = head
        self.ends_in_logits = head is not None
        self._hidden_size = self._blocks[0].out.outputs
        assert blocks[0] is not None
        self._dtype = cast(torch.Tensor, blocks[0].sources["out"][0].weight).dtype
        kind = self._dtype if weights == "packed" else weights
        self.most_tokens = MOST_TOKENS[kind]
        if kind == torch.bfloat16:
            linears = [linear for block in self._blocks.values() for linear in (block.out, block.up, block.down)]
            without_tiles = compiled.name == "amx" and any(linear.inputs % 32 for linear in linears)
            most = MOST_OF_BFLOAT16.get(compiled.name, self.most_tokens)
            self.most_tokens = MOST_WITHOUT_TILES if without_tiles else most
        self._in_parts = self.most_tokens == MOST_TOKENS[kind]

    def __call__(
        self, entered: torch.Tensor, layers: Sequence[int], cache: PlannedCache, inputs: StepInputs, **of_prompt: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run tokens through `layers` on top of the cache.

        Args:
            entered: tokens [tokens] where there are `tables`, else their hidden states [tokens, hidden].
            layers, cache, inputs: as of a `FastDecoder`'s step, of one whose places are known.
            of_prompt: as `prefill` gives them.

        Returns:
            The output in float32 and no logits where there is no head, else no output and logits.
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
        """The struct of a call, the logits that it writes unless it chooses tokens, and all else that it points to."""
        tokens = len(entered)
        places = inputs.rows_and_slots(tokens) if places is None else places
        rows, columns = places
        held: list[Any] = cache.layers
        end = max(columns) + 1
        for index in layers:
            layer = held[index]
            if layer.generated:
                layer.check_room(end)
            layer.length = end if layer.generated else 0
        alive: dict[str, Any] = {
            "layers": self.layer_structs(cache, passing),
            "running": _numbers(tuple(layers)),
            "row": array("i", rows),
            "column": array("i", columns),
        }
        step = StepStruct(
            **{name: _place_of(value) for name, value in alive.items()},
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
            hidden = torch.empty(tokens, self._hidden_size)
            if entered.dim() == 2:
                hidden.copy_(entered)
            alive["hidden"] = hidden
            step.hidden = hidden.data_ptr()
        prefixes = inputs.nested_rows(layers)
        if prefixes is not None:
            alive["prefixes"] = prefixes
            step.layer_tokens, step.layer_rows = _place_of(prefixes[0]), prefixes[1].data_ptr()
        alive["rotary"] = _set_rotary(step, inputs.rotary)
        if inputs.bias is not None:
            bias = alive["bias"] = inputs.bias.float().contiguous()  # [batch or 1, heads or 1, 1, columns]
            step.bias = bias.data_ptr()
            step.bias_row_stride = bias.stride(0) if len(bias) > 1 else 0
            step.bias_head_stride = bias.stride(1) if bias.shape[1] > 1 else 0
        if last is not None:
            alive["last"] = array("i", last)
            step.last, step.last_count, step.stop = _place_of(alive["last"]), len(last), stop
        if self.head is None:
            return step, None, alive
        step.head, step.final_norm = ctypes.addressof(self.head.struct), ctypes.addressof(self._final_norm)
        if chooses:
            return step, None, alive
        logits = torch.empty(tokens if last is None else len(last), self.head.struct.outputs)
        step.logits = logits.data_ptr()
        return step, logits, alive

    def choose(
        self, texts: TextsAtHand, layers: Sequence[Sequence[int]], cache: PlannedCache, prepared: PreparedInputs
    ) -> ChosenTokens:
        """Run each text's token and what is chosen after it, greedily, one after another.

        Args:
            texts: that the cache holds the columns before of.
            layers: of each step, each among those of the one before.
            cache: of them.
            prepared: the inputs of all steps.
        """
        for n, running in enumerate(layers, start=1):
            if n == len(layers) or running is not layers[n]:
                _check_room(cache, running, prepared.prompt_columns + texts.reach(n))
        step, greedy, chosen, counts, alive = self._greedy(texts, layers, len(layers), cache, prepared)
        done = self._kernels.greedy(self._kernels.number, step, greedy)
        del alive
        for n in range(_checked(done)):
            if n + 1 == done or layers[n] is not layers[n + 1]:
                self._set_length(cache, layers[n], prepared.prompt_columns + max(texts.starts) + n + 1)
        return ChosenTokens(chosen[:done].T, list(counts))

    def draft(
        self,
        texts: TextsAtHand,
        layers: Sequence[Sequence[int]],
        all_layers: Sequence[int],
        cache: PlannedCache,
        prepared: PreparedInputs,
        rule: DraftRule,
        rounds: int,
        drafter: "NativeSteps",
    ) -> DraftedRounds:
        """Draft tokens of each text, run them through `all_layers` and take those that these choose too, greedily.

        Args:
            texts, cache, prepared: as of `choose`.
            layers: of each draft of a round.
            all_layers: of the model.
            rule: of each round.
            rounds: at most.
            drafter: of the same model, which runs the drafts.
        """
        assert drafter.head is not None
        count, steps = len(texts.tokens), len(layers)
        most = min(max(texts.most), rounds * (steps + 1))
        _check_room(cache, all_layers, prepared.prompt_columns + texts.reach(most))
        step, greedy, chosen, counts, alive = self._greedy(texts, layers, most, cache, prepared)
        drafted, agreed = (array("i", [-1] * rounds * count) for _ in range(2))
        probabilities = torch.empty(rounds, steps, count)
        arrays = {name: array("f", getattr(rule, name)) for name in ("worth", "bounds", "shares")}
        all_running = _numbers(tuple(all_layers))
        drafts = DraftsStruct(
            layers=ctypes.addressof(drafter.layer_structs(cache, None)),
            head=ctypes.addressof(drafter.head.struct),
            all_running=_place_of(all_running),
            probabilities=probabilities.data_ptr(),
            drafted=_place_of(drafted),
            agreed=_place_of(agreed),
            all_count=len(all_layers),
            kinds=len(rule.bounds),
            rounds=rounds,
            **{name: _place_of(values) for name, values in arrays.items()},
        )
        done = _checked(self._kernels.lossless(self._kernels.number, step, greedy, drafts))
        del alive
        self._set_length(cache, all_layers, prepared.prompt_columns + max(texts.starts) + done)
        parts = [
            [each[n : n + count] for n in range(0, len(each), count)] for each in (drafted.tolist(), agreed.tolist())
        ]
        ran = sum(any(text >= 0 for text in of_round) for of_round in parts[1])
        found = ChosenTokens(chosen[:done].T, list(counts))
        return DraftedRounds(found, parts[0][:ran], parts[1][:ran], probabilities[:ran].tolist())

    def _greedy(
        self,
        texts: TextsAtHand,
        layers: Sequence[Sequence[int]],
        tokens: int,
        cache: PlannedCache,
        prepared: PreparedInputs,
    ) -> tuple[StepStruct, GreedyStruct, torch.Tensor, "array[int]", list[Any]]:
        """The structs of a call, the tokens [tokens, texts] and counts that it writes, and what else it points to."""
        columns = [prepared.prompt_columns + start for start in texts.starts]
        position_ids, rotary = prepared.of_sequences(texts.rows, texts.starts, tokens)
        inputs = StepInputs(columns[0], position_ids, None, prepared.bias)
        places = (texts.rows, columns)
        step, _, alive = self._step(texts.tokens, layers[0], cache, inputs, places=places, chooses=True)
        alive["rotary"] = _set_rotary(step, rotary)
        chosen = torch.empty(tokens, len(texts.tokens), dtype=torch.int64)
        counts = array("i", [0] * len(texts.tokens))
        running = [_numbers(tuple(each)) for each in layers]
        arrays = {
            "running": array("Q", map(_place_of, running)),
            "layer_counts": array("i", map(len, layers)),
            "ends": array("q", texts.ends),
            "most": array("i", texts.most),
        }
        greedy = GreedyStruct(
            position_ids=step.position_ids,
            rotary_token=alive["rotary"][0].stride(0) if rotary is not None else 0,
            chosen=chosen.data_ptr(),
            counts=_place_of(counts),
            steps=len(layers),
            end_count=len(texts.ends),
            **{name: _place_of(values) for name, values in arrays.items()},
        )
        return step, greedy, chosen, counts, [alive, running, arrays]

    def _set_length(self, cache: PlannedCache, layers: Sequence[int], columns: int) -> None:
        held: list[Any] = cache.layers
        for index in layers:
            held[index].length = columns

    def prefill(
        self, entered: torch.Tensor, layers: Sequence[int], cache: PlannedCache, inputs: PromptInputs, stop: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run a prompt's tokens through `layers` and fill the cache. Returns what a step does, of the last tokens.

        Above the first `stop` layers these alone run, and the others give keys and values as they stopped. Texts run
        together up to `most_tokens`.
        """
        held: list[Any] = cache.layers
        block = self._blocks[0]
        one = torch.empty(1, dtype=self._dtype)
        like = one.expand(inputs.batch, block.kv_heads, inputs.width, block.head_dim)
        kept = [held[index] for index in layers if held[index].generated]
        for layer in kept:
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
            if inputs.shown is not None:  # attended to with weight 0, what nobody writes
                for buffer in layer.buffers:
                    buffer[:, :, : inputs.slot].zero_()
        passing = torch.zeros(2, *like.shape, dtype=self._dtype) if len(kept) < len(layers) else None
        places = inputs.rows_and_slots(len(entered))
        hidden: list[torch.Tensor | None] = []
        logits: list[torch.Tensor | None] = []
        first, ends = 0, [end + 1 for end in inputs.last.tolist()]
        while first < len(entered):
            fitting = [end for end in ends if first < end <= first + self.most_tokens]
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
        """Whether the kernels are ahead of torch's operators for a prompt."""
        ends = inputs.last.tolist()
        if ends[-1] < self.most_tokens:
            return True
        longest = max(end - before for before, end in zip([-1, *ends], ends, strict=False))
        return self._in_parts and longest <= self.most_tokens

    def layer_structs(self, cache: PlannedCache, passing: torch.Tensor | None) -> Any:
        """The structs of all layers with their keys and values, whose buffers a cache allocates once.

        Those of a prompt that no token attends to later stand in `passing` [2, batch, heads, columns, head_dim].
        """
        known = self._caches.get(cache)
        if known is not None and passing is None:
            return known
        structs = _layer_structs(len(cache.layers))()
        held: list[Any] = cache.layers
        for struct, block, layer in zip(structs, self._addresses, held, strict=True):
            kept = layer.buffers if layer.is_initialized else passing
            if kept is None or block is None:
                continue  # no token of this cache's runs the layer
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
        """The projection as it is where it is the kernels' own, else of the model's weights."""
        found = [linear] if isinstance(linear, NativeLinear) else [native_linear(source) for source in sources]
        self._alive += found
        return found

    def _block(self, block: FastLayer) -> BlockStruct:
        struct = BlockStruct(
            attention_norm=self._norm(block.attention_norm),
            mlp_norm=self._norm(block.mlp_norm),
            query_norm=self._norm(block.query_norm),
            key_norm=self._norm(block.key_norm),
            heads=block.heads,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            interleaved=block.interleaved,
            window=block.window or 0,
            activation=ACTIVATIONS[block.activation_name],
            parallel=bool(block.parallel),
            norm_first=block.norm_first,
            scaling=block.scaling,
        )
        for name, sources in block.sources.items():
            linears = self._linears(getattr(block, name), sources)
            if name == "qkv":
                struct.projections = len(linears)
                for n, linear in enumerate(linears):
                    struct.qkv[n] = linear.struct
            elif linears:
                setattr(struct, name, linears[0].struct)
        return struct


def native_steps(
    blocks: Sequence[FastLayer | None],
    final_norm: Norm | None,
    head: tuple[Linear, nn.Module] | None,
    tables: tuple[torch.Tensor, torch.Tensor | None] | None,
    weights: Weights,
) -> NativeSteps | None:
    """A model's decode steps by the kernels; None where they weren't built or don't know the model's layers.

    The arguments are those of NativeSteps, but for the head, with its module.
    """
    compiled = kernels() if weights != "model" else None
    if compiled is None or not all(_known(block) for block in blocks if block is not None):
        return None
    if tables is not None and not all(table is None or table.is_contiguous() for table in tables):
        tables = None  # such as a slice of a wider one: torch looks its rows up
    last = None
    if head is not None:
        last = head[0] if isinstance(head[0], NativeLinear) else native_linear(head[1])
    return NativeSteps(compiled, blocks, final_norm, last, tables, weights)


def _checked(returned: int) -> int:
    """The tokens that a call of the kernels says. Raises IndexError, as torch does, where it says that it can't run."""
    if returned < 0:
        raise IndexError("a token or a position is not in the model's table of embeddings")
    return returned


def _check_room(cache: PlannedCache, layers: Sequence[int], columns: int) -> None:
    held: list[Any] = cache.layers
    for index in layers:
        held[index].check_room(columns)


@functools.cache
def _layer_structs(count: int) -> Any:
    """The type of so many structs: one that nobody holds is a cycle, which Python's collector has to find."""
    return LayerStruct * count


@functools.lru_cache(maxsize=1024)
def _numbers(layers: tuple[int, ...]) -> "array[int]":
    """The numbers of layers as the kernels take them, made once for each set of layers."""
    return array("i", layers)


def _place_of(held: Any) -> int:
    """The address of an array's values, or of a ctypes object."""
    return held.buffer_info()[0] if isinstance(held, array) else ctypes.addressof(held)


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The rows of all parts, if they are there."""
    found = [part for part in parts if part is not None]
    return (found[0] if len(found) == 1 else torch.cat(found)) if found else None


def _set_rotary(step: StepStruct, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor]:
    """Give a step its cosines and sines [..., tokens or 1, 1, rotated dimensions]. Returns what it points to."""
    if rotary is None:
        return []
    cos, sin = found = [part.squeeze(-2).float().contiguous() for part in rotary]
    step.cos, step.sin, step.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
    step.rotary_stride = cos.shape[-1] if cos.shape[-2] > 1 else 0
    return found


def native_linear(module: Any) -> NativeLinear:
    """A projection with the model's own weights, or a copy of them in the kernels' layout."""
    return NativeLinear(weight_of(module), module.bias)


def _known(block: FastLayer) -> bool:
    weight = cast(torch.Tensor, block.sources["out"][0].weight)
    return (
        weight.device.type == "cpu"
        and weight.dtype in KINDS
        and block.head_dim <= MOST_HEAD_DIM
        and block.activation_name in ACTIVATIONS
    )
