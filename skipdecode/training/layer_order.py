"""The order of a model's layers, the most important first, measured on rows of a task: `find_order`.

Law 1 asks for nested sets of layers, so any order gives a schedule: a budget of k runs the first k of the order
(`SkipSchedule`, placement "order"). On a pretrained model which layers run matters more than how many.

The order comes from greedy removal: starting with all layers, the one whose removal moves the model's predictions
least is taken out, again and again. The distance is the Kullback-Leibler divergence from full depth's next-token
distribution. It is compared with Block Influence (ShortGPT, arXiv 2403.03853), which takes a single pass.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from skipdecode.errors import ConfigError, check_counts, first_line
from skipdecode.families import decoder_layers, longest_sequence, unwrap
from skipdecode.files import write_whole
from skipdecode.gating import LayerGate, gated_layers, whole_columns
from skipdecode.schedule.schedule import SkipSchedule, check_order

SHORTLIST = 5  # layers that each removal tries, of those that cost least when they were last tried
BATCH_TOKENS = 512  # padded tokens of one forward pass: few, so that there is little padding
HEAD_ROWS = 64  # predicted tokens whose distributions are compared at once
# What an order is measured on unless somebody says otherwise: rows, and tokens of them all, for which full depth's
# distributions of the completions are kept, a vocabulary of floats a token.
ORDER_ROWS, MEASURED_TOKENS = 64, 4096


@dataclass(frozen=True)
class LayerOrder:
    """An order of layers and how it was found.

    Attributes:
        order: every layer's index once, the most important one first; layer 0 is the first, the last layer the second.
        divergence: number of layers -> divergence of that many first layers of the order from full depth, in nats per
            predicted token, without any training.
        influence: Block Influence of each layer, by its index: 1 - the mean cosine similarity of the hidden states
            before and after it.
        rows, tokens: training rows, and predicted tokens, that it was measured on.
        seconds: that it took.
    """

    order: tuple[int, ...]
    divergence: Mapping[int, float]
    influence: tuple[float, ...]
    rows: int
    tokens: int
    seconds: float

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LayerOrder":
        """What `save` wrote. Raises ConfigError that names the file where it can't be read or is damaged."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            divergence = {int(layers): float(value) for layers, value in values["divergence"].items()}
            order, influence = tuple(map(int, values["order"])), tuple(map(float, values["influence"]))
            return cls(order, divergence, influence, values["rows"], values["tokens"], values["seconds"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"order file {str(path)!r} can't be read: {first_line(error)}") from error

    @property
    def by_influence(self) -> tuple[int, ...]:
        """The layers by falling Block Influence, behind the same first two."""
        return (*self.order[:2], *sorted(self.order[2:], key=lambda layer: -self.influence[layer]))

    def to_json(self) -> str:
        """JSON text that `read_order` reads back."""
        values = asdict(self)
        values["divergence"] = {str(layers): value for layers, value in self.divergence.items()}
        return json.dumps(values) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file, whole or not at all."""
        write_whole(Path(path), self.to_json())


def choose_rows(rows: Any, count: int, *, seed: int) -> list[tuple[list[int], list[int]]]:
    """Rows to measure an order on, drawn without replacement: prompts and completions as token ids.

    Args:
        rows: a sequence of mappings with `prompt_ids` and `completion_ids`, such as a `datasets.Dataset`.
        count: how many; fewer where there are fewer, or where they would have more than `MEASURED_TOKENS` in all.
        seed: of the draw.
    """
    numbers = random.Random(seed).sample(range(len(rows)), min(count, len(rows)))
    chosen: list[tuple[list[int], list[int]]] = []
    tokens = 0
    for number in numbers:
        prompt, completion = list(rows[number]["prompt_ids"]), list(rows[number]["completion_ids"])
        tokens += len(prompt) + len(completion)
        if chosen and tokens > MEASURED_TOKENS:
            break
        chosen.append((prompt, completion))
    return chosen


def read_order(path: str | os.PathLike[str], num_layers: int) -> tuple[int, ...]:
    """The order in a JSON file: one that `LayerOrder.save` wrote, or a list of layer indices.

    Raises ConfigError that names the file where it can't be read or isn't an order of `num_layers` layers.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"order file {str(path)!r} can't be read: {first_line(error)}") from error
    if isinstance(values, dict):
        if "order" not in values:
            raise ConfigError(f"order file {str(path)!r} has no key 'order', only {', '.join(values)[:80]}")
        values = values["order"]
    try:
        return check_order(values, num_layers)
    except ConfigError as error:
        raise ConfigError(f"order file {str(path)!r}: {error}") from error


def find_order(
    model: nn.Module,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    shortlist: int | None = SHORTLIST,
    advance: Callable[[int, int, float], None] = lambda removed, total, divergence: None,
) -> LayerOrder:
    """The order of a model's layers by greedy removal; layer 0 and the last layer are never removed.

    Args:
        model: a causal language model of transformers; its weights stay as they are.
        rows: prompt and completion of each, as token ids. The model predicts the completion's tokens.
        shortlist: how many layers each removal tries, those that cost least when they were last tried; None: all, which
            takes about four times as long.
        advance: called after each removal with the layers removed so far, how many there will be, and the divergence.

    Raises:
        ConfigError: for no rows, an empty prompt or completion, rows longer than the model has positions, a shortlist
            below 1, a model of fewer than 3 layers, predictions that are no finite numbers.
    """
    if shortlist is not None:
        check_counts(shortlist=shortlist)
    depth = len(decoder_layers(model))
    if depth < 3:
        raise ConfigError(f"the model has {depth} layers: layer 0 and the last one always stay, so there is no order")
    if not rows:
        raise ConfigError("there are no rows: an order is measured on at least one prompt with its completion")
    for number, (prompt, completion) in enumerate(rows):
        if not prompt or not completion:
            raise ConfigError(f"row {number} has no {'prompt' if not prompt else 'completion'}")
    start, inner = time.perf_counter(), unwrap(model)
    positions = longest_sequence(inner.config)
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    if positions is not None and longest > positions:
        raise ConfigError(f"a row has {longest} tokens, and the model {positions} positions: take shorter prompts")
    training = inner.training
    inner.eval()
    try:
        plan = whole_columns(depth, tuple(range(depth)))
        full_depth = SkipSchedule.full_depth(depth)
        with torch.inference_mode(), gated_layers(model, full_depth, plan, prompt_columns=1) as gate, gate.obeyed():
            measured = _Measured(inner, gate, depth, _batches(rows, inner.device))
            removed, divergence = _remove(measured, depth, shortlist, advance)
    finally:
        inner.train(training)
    order = (0, depth - 1, *reversed(removed))
    return LayerOrder(
        order, divergence, measured.influence, len(rows), measured.tokens, round(time.perf_counter() - start, 1)
    )


class _Batch(NamedTuple):
    """Rows of similar lengths, padded on the right: no token sees what follows it, so no mask is needed.

    Attributes:
        input_ids: [rows, positions].
        real: whether a position holds a token, [rows, positions].
        predicting: whether a position predicts a token of its row's completion, [rows, positions].
        tokens: how many do.
    """

    input_ids: torch.Tensor
    real: torch.Tensor
    predicting: torch.Tensor
    tokens: int


class _Measured:
    """The rows, full depth's predictions of them, and what enters each of the layers that are left.

    Attributes:
        kept: the layers that are left, ascending.
        tokens: predicted tokens of all rows.
        influence: Block Influence of each layer, by its index.
    """

    def __init__(self, model: Any, gate: LayerGate, depth: int, batches: Sequence[_Batch]) -> None:
        self._model, self._gate, self._depth = model, gate, depth
        self._layers, self._batches = decoder_layers(model), batches
        self.kept = list(range(depth))
        self.tokens = sum(batch.tokens for batch in batches)
        self._entering: list[dict[int, torch.Tensor]] = []  # of each batch: layer -> [rows, positions, hidden]
        self._shares: list[torch.Tensor] = []  # of each batch: full depth's distributions, [predicted, vocabulary]
        self._entropies: list[float] = []  # of each batch: the sum over them of share * log share
        for batch in batches:
            entering, logits = self._run(batch, self.kept)
            self._entering.append(entering)
            self._shares.append(torch.cat([part.float().softmax(dim=-1) for part in logits.split(HEAD_ROWS)]))
            self._entropies.append(_agreement(self._shares[-1], logits))
        self.influence = self._influence()

    def without(self, layer: int, limit: float) -> tuple[float, list[dict[int, torch.Tensor]]]:
        """The divergence without one of the layers that are left; those below it aren't computed again.

        Args:
            layer: to leave out.
            limit: the divergence above which it doesn't matter. No token has a negative one, so what passes the limit
                with some of the rows is known to lie above it, and the others aren't computed.

        Returns:
            The mean over the predicted tokens that were computed, and, where these are all, what enters each layer
            above, by batch, for `remove`.
        """
        above, states = self.kept[self.kept.index(layer) + 1 :], []
        total, tokens = 0.0, 0
        for batch, entering, shares, entropy in zip(
            self._batches, self._entering, self._shares, self._entropies, strict=True
        ):
            entered, logits = self._run(batch, above, entering[layer])
            states.append(entered)
            total += entropy - _agreement(shares, logits)
            tokens += batch.tokens
            if total > limit * self.tokens:
                break
        return total / tokens, states

    def remove(self, layer: int, states: list[dict[int, torch.Tensor]]) -> None:
        """Leave a layer out for good, with what then enters those above."""
        self.kept.remove(layer)
        for entering, entered in zip(self._entering, states, strict=True):
            del entering[layer]
            entering |= entered

    def _run(
        self, batch: _Batch, layers: Sequence[int], hidden: torch.Tensor | None = None
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Run `layers` alone, the first of them on `hidden` where it is given.

        Returns what enters each of them, and the logits of the predicted tokens [predicted, vocabulary].
        """
        self._gate.plan = whole_columns(self._depth, tuple(layers))
        entering: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:

            def enter(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                given = hidden if hidden is not None and layer == layers[0] else args[0]
                entering[layer] = given
                return (given, *args[1:]), kwargs

            def predict(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
                return args[0][batch.predicting][None]  # [rows, positions, hidden] -> [1, predicted, hidden]

            for layer in layers:
                hook = self._layers[layer].register_forward_pre_hook(partial(enter, layer), with_kwargs=True)
                hooks.callback(hook.remove)
            hooks.callback(self._model.get_output_embeddings().register_forward_pre_hook(predict).remove)
            logits: torch.Tensor = self._model(batch.input_ids, use_cache=False).logits
        return entering, logits[0]

    def _influence(self) -> tuple[float, ...]:
        """Block Influence of each layer, over the positions that hold tokens; the last layer's is not known: 1."""
        shares = []
        for layer in range(self._depth - 1):
            cosines = [
                functional.cosine_similarity(entering[layer].float(), entering[layer + 1].float(), dim=-1)[batch.real]
                for batch, entering in zip(self._batches, self._entering, strict=True)
            ]
            shares.append(1 - float(torch.cat(cosines).mean()))
        return (*shares, 1.0)


def _agreement(shares: torch.Tensor, logits: torch.Tensor) -> float:
    """The sum over tokens of full depth's shares times the log shares of `logits`, both [tokens, vocabulary].

    Few tokens at a time: a vocabulary of floats for each would not fit the processor's caches.
    """
    total = 0.0
    for part, given in zip(shares.split(HEAD_ROWS), logits.split(HEAD_ROWS), strict=True):
        total += float(functional.log_softmax(given.float(), dim=-1).mul_(part).sum())
    return total


def _remove(
    measured: _Measured, depth: int, shortlist: int | None, advance: Callable[[int, int, float], None]
) -> tuple[list[int], dict[int, float]]:
    """Remove one layer after the other. Returns them, the least important first, and the divergence by layers left."""
    removed, now = list[int](), 0.0
    divergence = {depth: 0.0}
    # layer -> what its removal added to the divergence when it was last tried; at first a guess, which only orders
    costs = dict(enumerate(measured.influence))
    total = depth - 2
    while len(measured.kept) > 2:
        candidates = sorted(measured.kept[1:-1], key=lambda layer: costs[layer])
        least, lowest, entering = -1, math.inf, list[dict[int, torch.Tensor]]()
        for layer in candidates[: shortlist if removed else None]:
            found, states = measured.without(layer, lowest)
            costs[layer] = found - now  # of some of the rows, where it passed the limit
            if found < lowest:
                least, lowest, entering = layer, found, states
        if least < 0:
            raise ConfigError("without a layer the model's predictions are not finite: take another dtype, as float32")
        now = lowest
        measured.remove(least, entering)
        removed.append(least)
        divergence[len(measured.kept)] = now
        advance(len(removed), total, now)
    return removed, divergence


def _batches(rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> list[_Batch]:
    """The rows in batches of similar lengths, of `BATCH_TOKENS` padded tokens or a single row."""
    groups: list[list[tuple[Sequence[int], Sequence[int]]]] = [[]]
    for row in sorted(rows, key=lambda row: len(row[0]) + len(row[1])):
        if groups[-1] and (len(row[0]) + len(row[1])) * (len(groups[-1]) + 1) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return [_batch(group, device) for group in groups]


def _batch(rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> _Batch:
    ids = pad_sequence([torch.tensor([*prompt, *completion]) for prompt, completion in rows], batch_first=True)
    positions = torch.arange(ids.shape[1])
    starts = torch.tensor([len(prompt) for prompt, _ in rows])[:, None]
    ends = starts + torch.tensor([len(completion) for _, completion in rows])[:, None]
    predicting = (starts - 1 <= positions) & (positions < ends - 1)
    return _Batch(ids.to(device), (positions < ends).to(device), predicting.to(device), int(predicting.sum()))
