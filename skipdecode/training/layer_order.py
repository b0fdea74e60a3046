"""Measure the order of a model's layers, the most important first, on rows of a task: `find_order`.

Any order gives a valid schedule: a budget of k runs the first k layers (`SkipSchedule`, placement "order"). In a
pretrained model, the choice of layers matters more than their number.

The order comes from greedy removal: starting with all layers, the layer whose removal changes the model's predictions
least is removed, repeatedly. The change is measured as the Kullback-Leibler divergence from the complete model's
next-token distribution. For comparison, Block Influence (ShortGPT, arXiv 2403.03853) is computed too, in a single pass.
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
from skipdecode.files import write_atomically
from skipdecode.gating import LayerGate, all_positions, gated_layers
from skipdecode.schedule.schedule import SkipSchedule, check_order

SHORTLIST = 5  # default number of layers that each removal tries
BATCH_TOKENS = 512  # padded tokens of a forward pass; a small number keeps the padding small
HEAD_ROWS = 64  # predicted tokens whose distributions are compared at once
# The default number of rows, and the maximum of their tokens, since the complete model's distribution over the
# vocabulary is kept for every predicted token.
ORDER_ROWS, MEASURED_TOKENS = 64, 4096


@dataclass(frozen=True)
class LayerOrder:
    """An order of layers and how it was measured.

    Attributes:
        order: every layer's index once, the most important first; layer 0 is first and the last layer second.
        divergence: number of layers -> divergence, in nats per predicted token, of the untrained model that runs this
            many first layers of the order from the complete model.
        influence: Block Influence of each layer by its index: 1 minus the mean cosine similarity of the hidden states
            before and after the layer.
        rows: number of rows that the order was measured on.
        tokens: number of predicted tokens in these rows.
        seconds: duration of the measurement.
    """

    order: tuple[int, ...]
    divergence: Mapping[int, float]
    influence: tuple[float, ...]
    rows: int
    tokens: int
    seconds: float

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LayerOrder":
        """Read a file that `save` wrote. Raises ConfigError, which names the file, where it can't be read."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            divergence = {int(layers): float(value) for layers, value in values["divergence"].items()}
            order, influence = tuple(map(int, values["order"])), tuple(map(float, values["influence"]))
            return cls(order, divergence, influence, values["rows"], values["tokens"], values["seconds"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"order file {str(path)!r} can't be read: {first_line(error)}") from error

    @property
    def by_influence(self) -> tuple[int, ...]:
        """The layers sorted by decreasing Block Influence, after the same first two."""
        return (*self.order[:2], *sorted(self.order[2:], key=lambda layer: -self.influence[layer]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file that `read_order` reads, atomically."""
        write_atomically(Path(path), json.dumps(asdict(self)) + "\n")


def choose_rows(rows: Any, count: int, *, seed: int) -> list[tuple[list[int], list[int]]]:
    """Draw rows to measure an order on, without replacement.

    Args:
        rows: a sequence of mappings with `prompt_ids` and `completion_ids`, such as a `datasets.Dataset`.
        count: number of rows; fewer are drawn where there are fewer, or they exceed `MEASURED_TOKENS` in all.

    Returns:
        The prompt and the completion of each row, as token ids.
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
    """Read an order from a JSON file that `LayerOrder.save` wrote, or that contains a list of layer indices.

    Raises ConfigError, which names the file, where it can't be read or isn't an order of `num_layers` layers.
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
    """Find the order of a model's layers by greedy removal; layer 0 and the last layer are never removed.

    Args:
        model: a causal language model of transformers; its weights aren't changed.
        rows: the prompt and the completion of each row, as token ids. The model predicts the completion's tokens.
        shortlist: number of layers that each removal tries, those whose removal changed the predictions least when last
            tried; None: all layers, which takes about four times as long.
        advance: called after each removal with the number of layers removed so far, the number to be removed, and the
            divergence.

    Raises:
        ConfigError: for no rows, an empty prompt or completion, rows longer than the model has positions, a shortlist
            below 1, a model of fewer than 3 layers, predictions that aren't finite.
    """
    if shortlist is not None:
        check_counts(shortlist=shortlist)
    depth = len(decoder_layers(model))
    if depth < 3:
        raise ConfigError(f"the model has {depth} layers: an order needs at least 3, since the first and last stay")
    if not rows:
        raise ConfigError("there are no rows: an order is measured on at least one prompt with its completion")
    for number, (prompt, completion) in enumerate(rows):
        if not prompt or not completion:
            raise ConfigError(f"row {number} has no {'prompt' if not prompt else 'completion'}")
    start, inner = time.perf_counter(), unwrap(model)
    positions = longest_sequence(inner.config)
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    if positions is not None and longest > positions:
        raise ConfigError(f"a row has {longest} tokens, and the model {positions} positions: use shorter prompts")
    training = inner.training
    inner.eval()
    try:
        plan = all_positions(depth, tuple(range(depth)))
        full_depth = SkipSchedule.full_depth(depth)
        with torch.inference_mode(), gated_layers(model, full_depth, plan, prompt_columns=1) as gate, gate.active():
            measured = _Measured(inner, gate, depth, _batches(rows, inner.device))
            removed, divergence = _remove(measured, depth, shortlist, advance)
    finally:
        inner.train(training)
    order = (0, depth - 1, *reversed(removed))
    return LayerOrder(
        order, divergence, measured.influence, len(rows), measured.tokens, round(time.perf_counter() - start, 1)
    )


class _Batch(NamedTuple):
    """Rows of similar lengths, padded on the right, so that causal attention needs no mask.

    Attributes:
        real: whether a position holds a token, [rows, positions].
        predicting: whether a position predicts a token of its row's completion, [rows, positions].
        tokens: number of predicting positions.
    """

    input_ids: torch.Tensor
    real: torch.Tensor
    predicting: torch.Tensor
    tokens: int


class _Measured:
    """The rows, the complete model's predictions, and the inputs of the remaining layers.

    Attributes:
        kept: the remaining layers, ascending.
        influence: Block Influence of each layer, by its index.
    """

    def __init__(self, model: Any, gate: LayerGate, depth: int, batches: Sequence[_Batch]) -> None:
        self._model, self._gate, self._depth = model, gate, depth
        self._layers, self._batches = decoder_layers(model), batches
        self.kept = list(range(depth))
        self.tokens = sum(batch.tokens for batch in batches)
        # For each batch: layer -> input [rows, positions, hidden]; the complete model's distributions [predicted,
        # vocabulary]; their negative entropy, summed over the predicted tokens.
        self._inputs: list[dict[int, torch.Tensor]] = []
        self._teachers: list[torch.Tensor] = []
        self._negative_entropies: list[float] = []
        for batch in batches:
            inputs, logits = self._run(batch, self.kept)
            self._inputs.append(inputs)
            self._teachers.append(torch.cat([part.float().softmax(dim=-1) for part in logits.split(HEAD_ROWS)]))
            self._negative_entropies.append(_expected_log_probability(self._teachers[-1], logits))
        self.influence = self._influence()

    def without(self, layer: int, limit: float) -> tuple[float, list[dict[int, torch.Tensor]]]:
        """The divergence without one of the remaining layers; the layers below it aren't computed again.

        Args:
            limit: the divergence above which the exact value doesn't matter. Since no token's divergence is negative,
                the computation stops as soon as the sum over some rows exceeds the limit.

        Returns:
            The mean over the predicted tokens that were computed; and, where all were, for each batch the inputs of the
            layers above, for `remove`.
        """
        above, new_inputs = self.kept[self.kept.index(layer) + 1 :], []
        total, tokens = 0.0, 0
        for batch, inputs, teacher, negative_entropy in zip(
            self._batches, self._inputs, self._teachers, self._negative_entropies, strict=True
        ):
            above_inputs, logits = self._run(batch, above, inputs[layer])
            new_inputs.append(above_inputs)
            total += negative_entropy - _expected_log_probability(teacher, logits)
            tokens += batch.tokens
            if total > limit * self.tokens:
                break
        return total / tokens, new_inputs

    def remove(self, layer: int, new_inputs: list[dict[int, torch.Tensor]]) -> None:
        """Remove a layer; `new_inputs` are those that `without` gave for it."""
        self.kept.remove(layer)
        for inputs, changed in zip(self._inputs, new_inputs, strict=True):
            del inputs[layer]
            inputs |= changed

    def _run(
        self, batch: _Batch, layers: Sequence[int], hidden: torch.Tensor | None = None
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Run only `layers`, the first of them on `hidden` where that is given.

        Returns the input of each layer, and the logits of the predicted tokens, [predicted, vocabulary].
        """
        self._gate.plan = all_positions(self._depth, tuple(layers))
        inputs: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:

            def enter(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                given = hidden if hidden is not None and layer == layers[0] else args[0]
                inputs[layer] = given
                return (given, *args[1:]), kwargs

            def predict(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
                return args[0][batch.predicting][None]  # [rows, positions, hidden] -> [1, predicted, hidden]

            for layer in layers:
                hook = self._layers[layer].register_forward_pre_hook(partial(enter, layer), with_kwargs=True)
                hooks.callback(hook.remove)
            hooks.callback(self._model.get_output_embeddings().register_forward_pre_hook(predict).remove)
            logits: torch.Tensor = self._model(batch.input_ids, use_cache=False).logits
        return inputs, logits[0]

    def _influence(self) -> tuple[float, ...]:
        """Block Influence of each layer over real tokens; the last layer's output isn't known, so it gets 1."""
        influence = []
        for layer in range(self._depth - 1):
            cosines = [
                functional.cosine_similarity(inputs[layer].float(), inputs[layer + 1].float(), dim=-1)[batch.real]
                for batch, inputs in zip(self._batches, self._inputs, strict=True)
            ]
            influence.append(1 - float(torch.cat(cosines).mean()))
        return (*influence, 1.0)


def _expected_log_probability(teacher: torch.Tensor, logits: torch.Tensor) -> float:
    """The sum over tokens of teacher probability times log probability of `logits`, both [tokens, vocabulary].

    It handles few tokens at a time, so that their distributions fit into the processor's caches.
    """
    total = 0.0
    for part, given in zip(teacher.split(HEAD_ROWS), logits.split(HEAD_ROWS), strict=True):
        total += float(functional.log_softmax(given.float(), dim=-1).mul_(part).sum())
    return total


def _remove(
    measured: _Measured, depth: int, shortlist: int | None, advance: Callable[[int, int, float], None]
) -> tuple[list[int], dict[int, float]]:
    """Remove layers one by one.

    Returns them, the least important first, and the divergence by the number of remaining layers.
    """
    removed, current = list[int](), 0.0
    divergence = {depth: 0.0}
    # layer -> what its removal added to the divergence when last tried; at first an estimate, used for sorting only
    costs = dict(enumerate(measured.influence))
    while len(measured.kept) > 2:
        candidates = sorted(measured.kept[1:-1], key=lambda layer: costs[layer])
        best, lowest, best_inputs = -1, math.inf, list[dict[int, torch.Tensor]]()
        for layer in candidates[: shortlist if removed else None]:
            found, new_inputs = measured.without(layer, lowest)
            costs[layer] = found - current  # of a part of the rows, where it exceeded the limit
            if found < lowest:
                best, lowest, best_inputs = layer, found, new_inputs
        if best < 0:
            raise ConfigError("without a layer the model's predictions are not finite: use another dtype, e.g. float32")
        current = lowest
        measured.remove(best, best_inputs)
        removed.append(best)
        divergence[len(measured.kept)] = current
        advance(len(removed), depth - 2, current)
    return removed, divergence


def _batches(rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> list[_Batch]:
    """The rows in batches of similar lengths, of at most `BATCH_TOKENS` padded tokens or a single row."""
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
