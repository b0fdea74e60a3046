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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from skipdecode.errors import ConfigError, check_counts, first_line
from skipdecode.families import decoder_layers, text_config, unwrap
from skipdecode.files import write_atomically
from skipdecode.gating import LayerGate, all_positions, gated_layers
from skipdecode.schedule.schedule import SkipSchedule, check_order
from skipdecode.training.batch_layout import IGNORED, lay_out

SHORTLIST = 5  # layers that each removal tries, of those that cost least when they were last tried
BATCH_TOKENS = 2048  # padded tokens of one forward pass
# What an order is measured on unless somebody says otherwise: rows, and tokens of them all, for which full depth's
# distributions of the completions are kept, a vocabulary of floats a token.
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

    def to_json(self) -> str:
        """The JSON text that `read_order` reads."""
        values = asdict(self)
        values["divergence"] = {str(layers): value for layers, value in self.divergence.items()}
        return json.dumps(values) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file atomically."""
        write_atomically(Path(path), self.to_json())


def choose_rows(rows: Any, count: int, *, seed: int) -> list[tuple[list[int], list[int]]]:
    """Draw rows to measure an order on, without replacement.

    Args:
        rows: a sequence of mappings with `prompt_ids` and `completion_ids`, such as a `datasets.Dataset`.
        count: number of rows; fewer are drawn where there are fewer, or they exceed `MEASURED_TOKENS` in all.
        seed: seed of the draw.

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
            below 1, a model of fewer than 3 layers.
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
    positions = getattr(text_config(inner.config), "max_position_embeddings", None)
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    if positions is not None and longest > positions:
        raise ConfigError(f"a row has {longest} tokens, and the model {positions} positions: take shorter prompts")
    training = inner.training
    inner.eval()
    try:
        plan = all_positions(depth, tuple(range(depth)))
        full_depth = SkipSchedule.full_depth(depth)
        with torch.inference_mode(), gated_layers(model, full_depth, plan, prompt_columns=1) as gate, gate.active():
            measured = _Measured(inner, gate, depth, _batches(rows))
            removed, divergence = _remove(measured, depth, shortlist, advance)
    finally:
        inner.train(training)
    order = (0, depth - 1, *reversed(removed))
    return LayerOrder(
        order, divergence, measured.influence, len(rows), measured.tokens, round(time.perf_counter() - start, 1)
    )


class _Measured:
    """The rows, full depth's predictions of them, and what enters each layer that is kept."""

    def __init__(self, model: Any, gate: LayerGate, depth: int, batches: Sequence[dict[str, Any]]) -> None:
        self._model, self._gate, self._depth = model, gate, depth
        self._layers = decoder_layers(model)
        self._batches = [
            {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in batches
        ]
        self._entering: list[dict[int, torch.Tensor]] = []  # of each batch: layer -> [batch, positions, hidden]
        self._kept: tuple[int, ...] = ()
        full = self.enter(tuple(range(depth)))
        self._teacher = [functional.log_softmax(logits, dim=-1) for logits in full]
        self.tokens = sum(len(logits) for logits in full)
        self.influence = self._influence()

    def enter(self, kept: tuple[int, ...]) -> list[torch.Tensor]:
        """Keep what enters each of the layers `kept` when they alone run.

        Returns the logits of each batch's predicted tokens, [predicted, vocabulary].
        """
        self._kept, self._entering, found = kept, [], []
        for batch in self._batches:
            entering: dict[int, torch.Tensor] = {}
            with self._hooked({layer: _keep(entering, layer) for layer in kept}):
                found.append(self._logits(batch, kept))
            self._entering.append(entering)
        return found

    def without(self, layer: int) -> float:
        """The divergence without one of the kept layers; the layers below it aren't computed again."""
        above = self._kept[self._kept.index(layer) + 1 :]
        total = 0.0
        for batch, entering, teacher in zip(self._batches, self._entering, self._teacher, strict=True):
            with self._hooked({above[0]: _give(entering[layer])}):
                student = functional.log_softmax(self._logits(batch, above), dim=-1)
            total += float(functional.kl_div(student, teacher, reduction="sum", log_target=True))
        return total / self.tokens

    def _logits(self, batch: dict[str, Any], layers: tuple[int, ...]) -> torch.Tensor:
        """Of the predicted tokens of a batch, when `layers` alone run, [predicted, vocabulary], in float32."""
        self._gate.plan = all_positions(self._depth, layers)
        labels = batch["labels"][:, batch["prompt_columns"] :]
        columns = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = self._model(**columns, use_cache=False, logits_to_keep=labels.shape[1] + 1).logits
        predicted: torch.Tensor = logits[:, :-1][labels != IGNORED].float()
        return predicted

    def _influence(self) -> tuple[float, ...]:
        """Block Influence of each layer, over the positions that hold tokens; the last layer's is not known: 1."""
        shares = []
        for layer in range(self._depth - 1):
            cosines = [
                functional.cosine_similarity(entering[layer].float(), entering[layer + 1].float(), dim=-1)[
                    batch["attention_mask"].bool()
                ]
                for batch, entering in zip(self._batches, self._entering, strict=True)
            ]
            shares.append(1 - float(torch.cat(cosines).mean()))
        return (*shares, 1.0)

    @contextmanager
    def _hooked(self, hooks: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
        handles = [self._layers[n].register_forward_pre_hook(hook, with_kwargs=True) for n, hook in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _remove(
    measured: _Measured, depth: int, shortlist: int | None, advance: Callable[[int, int, float], None]
) -> tuple[list[int], dict[int, float]]:
    """Remove one layer after the other. Returns them, the least important first, and the divergence by layers left."""
    kept, removed, now = list(range(depth)), list[int](), 0.0
    divergence = {depth: 0.0}
    costs: dict[int, float] = {}  # layer -> what its removal added to the divergence when it was last tried
    total = depth - 2
    while len(kept) > 2:
        measured.enter(tuple(kept))
        candidates = sorted(kept[1:-1], key=lambda layer: costs.get(layer, -math.inf))
        tried = {layer: measured.without(layer) for layer in candidates[: shortlist if costs else None]}
        costs |= {layer: value - now for layer, value in tried.items()}
        least = min(tried, key=lambda layer: (tried[layer], layer))
        now = tried[least]
        kept.remove(least)
        del costs[least]
        removed.append(least)
        divergence[len(kept)] = now
        advance(len(removed), total, now)
    return removed, divergence


def _keep(entering: dict[int, torch.Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering[layer] = args[0]

    return hook


def _give(hidden: torch.Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (hidden, *args[1:]), kwargs

    return hook


def _batches(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[dict[str, Any]]:
    """The rows in batches of similar lengths, of `BATCH_TOKENS` padded tokens or a single row."""
    ordered = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    groups: list[list[tuple[Sequence[int], Sequence[int]]]] = [[]]
    for row in ordered:
        longer = [*groups[-1], row]
        width = max(len(prompt) for prompt, _ in longer) + max(len(completion) for _, completion in longer)
        if groups[-1] and width * len(longer) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(row)
    return [lay_out([list(p) for p, _ in group], [list(c) for _, c in group], 0) for group in groups]
