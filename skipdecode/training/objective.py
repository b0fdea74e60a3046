"""The training objective: next-token loss on completions under a schedule, logged by bands of depth."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from skipdecode.schedule.schedule import SkipSchedule
from skipdecode.training.batch_layout import IGNORED
from skipdecode.training.exits import Exits
from skipdecode.training.kept_values import KeptValues

BANDS = 4  # number of bands into which the depth is divided for logging


@dataclass(frozen=True)
class Objective:
    """The loss that a training step minimises.

    Attributes:
        depth_weight_power: see `completion_loss`.
        label_smoothing: see `completion_loss`.
        distillation: weight of the divergence from full depth in the loss of each schedule that skips layers, or of
            each exit below the last layer.
        exits: whether every layer has an exit with a loss, instead of the last layer alone.
        exit_every: if not 0, only the last exit and every so many-th other one have a loss in a step, others in the
            next step, with the weights of `layerskip_weights`.
        frozen_teacher: whether a frozen model teaches every schedule, instead of the trained model's own full depth.
    """

    depth_weight_power: float = 0.0
    label_smoothing: float = 0.0
    distillation: float = 0.0
    exits: bool = False
    exit_every: int = 0
    frozen_teacher: bool = False

    def totals(self, schedules: Sequence[SkipSchedule], labels: torch.Tensor) -> torch.Tensor:
        """The divisors of a batch's losses: the number of tokens, and the sum of their weights under each schedule.

        The divisors of a step are the sums over its accumulated batches and its processes.

        Args:
            schedules: see `shares`.
            labels: see `shares`.

        Returns:
            [1 + schedules].
        """
        tokens = (labels != IGNORED).sum(dim=0).float()  # [new tokens]
        weights = [
            position_weights(predicting_budgets(s, len(tokens)), s.num_layers, self.depth_weight_power, tokens)
            for s in schedules
        ]
        return torch.stack([tokens.sum(), *((tokens * weight).sum() for weight in weights)])

    def shares(
        self,
        schedules: Sequence[SkipSchedule],
        labels: torch.Tensor,
        run: Callable[[SkipSchedule], torch.Tensor],
        teach: Callable[[], torch.Tensor],
        run_exits: Callable[[SkipSchedule], Exits],
        *,
        totals: torch.Tensor | None = None,
        bands: "DepthBands | None" = None,
        step: int = 0,
    ) -> Iterator[torch.Tensor]:
        """Yield the loss of each schedule of a step, divided by their number; the step minimises the sum.

        With exits there is one schedule, and its loss is the mean over the exits. Losses come one at a time, so that
        the caller can run each backward pass, which frees its activations, before the next forward pass.

        Args:
            schedules: full depth must come first if it is among them, because its output teaches the others. With
                exits it is the only schedule.
            labels: the completions' tokens, [batch, new tokens].
            run: computes logits under a schedule, from the last prompt position on,
                [batch, new tokens + 1, vocabulary].
            teach: computes the teacher's logits, without a gradient; called at most once.
            run_exits: computes every layer's output under a schedule; called only with exits.
            totals: divisors of the whole step, where this batch is a part of it; None: this batch's own.
            bands: see `completion_loss`.
            step: number of the optimiser step, by which rotating exits take turns.
        """
        num_items, *total_weights = self.totals(schedules, labels) if totals is None else totals
        if self.exits:
            (full_depth,) = schedules
            yield self.exits_loss(run_exits(full_depth), labels, num_items=num_items, bands=bands, step=step)
            return
        teacher: torch.Tensor | None = None
        for schedule, total_weight in zip(schedules, total_weights, strict=True):
            taught = bool(self.distillation) and (schedule.skips or self.frozen_teacher)
            if taught and teacher is None:
                teacher = teach()
            logits = run(schedule)
            loss = completion_loss(
                logits[:, :-1],
                labels,
                predicting_budgets(schedule, labels.shape[1]),
                num_layers=schedule.num_layers,
                total_weight=total_weight,
                depth_weight_power=self.depth_weight_power,
                label_smoothing=self.label_smoothing,
                bands=bands,
            )
            if taught:
                assert teacher is not None
                divergence = distillation_loss(logits[:, :-1], teacher[:, :-1], labels, num_items=num_items)
                loss = (1 - self.distillation) * loss + self.distillation * divergence
            elif self.distillation:
                teacher = logits.detach()
            del logits  # free them before the next pass
            yield loss / len(schedules)

    def exits_loss(
        self,
        exits: Exits,
        labels: torch.Tensor,
        *,
        num_items: torch.Tensor | int,
        bands: "DepthBands | None" = None,
        step: int = 0,
    ) -> torch.Tensor:
        """The mean loss over the exits after every layer, weighted by (layers of the exit) ** `depth_weight_power`.

        With `exit_every`, over those whose turn it is, with other weights (`layerskip_weights`). Power 1 is the
        training objective of CALM (Schuster et al. 2022, arXiv 2207.07061); 0 weighs all exits equally.

        Args:
            exits: outputs of a full-depth forward pass.
            labels: the completions' tokens, [batch, new tokens].
            num_items: number of tokens to divide by.
            bands: see `completion_loss`; an exit counts in the band of its depth.
            step: see `shares`.

        Returns:
            A scalar.
        """
        depth, counted = len(exits.hidden), labels != IGNORED
        with torch.no_grad():
            taught = exits.head(exits.hidden[-1]) if self.distillation else None
        total, weights = torch.zeros((), device=labels.device), 0.0
        if self.exit_every:
            exit_weights = layerskip_weights(depth, self.exit_every, step)
        else:
            exit_weights = [(layers / depth) ** self.depth_weight_power for layers in range(1, depth + 1)]
        for layers, (hidden, weight) in enumerate(zip(exits.hidden, exit_weights, strict=True), start=1):
            if not weight:
                continue
            # One exit's logits are as large as those of a whole step without exits. They are recomputed in the backward
            # pass, so that memory never holds those of two exits.
            plain, losses = checkpoint(
                self._exit_losses,
                exits.head,
                hidden,
                labels,
                taught if layers < depth else None,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            if bands is not None:
                bands.add(plain, counted, [layers] * labels.shape[1])
            total, weights = total + weight * losses.sum(), weights + weight
        return total / weights / num_items

    def _exit_losses(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        taught: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The token losses of one exit, each [batch, new tokens]: against the labels, and including distillation."""
        logits = head(hidden)
        losses = token_losses(logits, labels, self.label_smoothing)
        if taught is None:
            return losses, losses
        divergence = _token_divergences(logits, taught) * (labels != IGNORED)
        return losses, (1 - self.distillation) * losses + self.distillation * divergence


def layerskip_weights(num_layers: int, every: int, step: int) -> list[float]:
    """The weight of each layer's exit in a step of LayerSkip (arXiv 2404.16710, equations 5 to 7, with e_scale 1).

    Layer l, counted from 0, has the weight 0 + 1 + ... + l, and the last one L - 1 more than the layer below it. The
    last exit has a loss in each step, and of the others every `every`-th, beginning one higher in each step.

    >>> layerskip_weights(5, 2, 0), layerskip_weights(5, 2, 1)
    ([0, 0, 3, 0, 10], [0, 1, 0, 6, 10])
    """
    weights = [layer * (layer + 1) // 2 for layer in range(num_layers - 1)]
    weights = [weight if (layer - step) % every == 0 else 0 for layer, weight in enumerate(weights)]
    return [*weights, num_layers - 1 + (num_layers - 2) * (num_layers - 1) // 2]


def unpack_batch(batch: Mapping[str, Any]) -> tuple[int, dict[str, Any], torch.Tensor]:
    """Split a collated batch into its prompt length, the model's arguments, and labels [batch, new tokens]."""
    prompt_columns: int = batch["prompt_columns"]
    labels = batch["labels"][:, prompt_columns:]
    arguments = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    arguments["logits_to_keep"] = labels.shape[1] + 1  # from the last prompt position on
    return prompt_columns, {**arguments, "use_cache": False}, labels


def predicting_budgets(schedule: SkipSchedule, new_tokens: int) -> list[int]:
    """The number of layers run at the position that predicts each of the first `new_tokens` generated tokens.

    The last prompt position predicts token 0; step i predicts token i + 1.
    """
    return [len(schedule.prompt_layers), *(schedule.budget(i) for i in range(new_tokens - 1))]


@dataclass
class DepthBands:
    """Sums of token losses since the last `take`, grouped by the number of layers that predicted the token.

    Call `read` before you look at `sums` and `counts`.
    """

    num_layers: int
    sums: list[float] = field(default_factory=lambda: [0.0] * BANDS)
    counts: list[float] = field(default_factory=lambda: [0.0] * BANDS)
    _kept: KeptValues = field(default_factory=KeptValues, repr=False)

    def band(self, budget: int) -> int:
        return min(BANDS - 1, (budget - 1) * BANDS // self.num_layers)

    def name(self, band: int) -> str:
        """The metric name of a band, such as `loss_layers_1_to_3`."""
        inside = [k for k in range(1, self.num_layers + 1) if self.band(k) == band]
        return "_".join(["loss_layers", str(inside[0]), "to", str(inside[-1])]) if inside else f"loss_band_{band}"

    def add(self, losses: torch.Tensor, counted: torch.Tensor, budgets: list[int]) -> None:
        """Add token losses [batch, new tokens] where `counted` is true; `budgets` has one number per position."""
        by_position = (losses.detach() * counted).sum(dim=0)
        tokens = counted.sum(dim=0).to(by_position.dtype)
        self._kept.keep(torch.cat([by_position, tokens]), partial(self._add, budgets))  # [2 * new tokens]

    def _add(self, budgets: list[int], values: list[float]) -> None:
        by_position, tokens = values[: len(budgets)], values[len(budgets) :]
        for total, count, budget in zip(by_position, tokens, budgets, strict=True):
            self.sums[self.band(budget)] += total
            self.counts[self.band(budget)] += count

    def read(self) -> None:
        """Bring `sums` and `counts` up to date, for which the host waits for the device."""
        self._kept.read()

    def take(self) -> dict[str, float]:
        """The mean loss of each band since the last call; bands without tokens are left out."""
        self.read()
        means = {self.name(b): s / n for b, (s, n) in enumerate(zip(self.sums, self.counts, strict=True)) if n}
        self.sums, self.counts = [0.0] * BANDS, [0.0] * BANDS
        return means


def completion_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    budgets: list[int],
    *,
    num_layers: int,
    total_weight: torch.Tensor | None = None,
    depth_weight_power: float = 0.0,
    label_smoothing: float = 0.0,
    bands: DepthBands | None = None,
) -> torch.Tensor:
    """The mean next-token loss over the completions' tokens; prompts and padding don't count.

    The gradient is exact: a token's loss reaches the layers run at its own position and, through attention, the layers
    that computed the keys and values they read.

    Args:
        logits: logits at the positions that predict the completion, [batch, new tokens, vocabulary].
        labels: the completions' tokens, [batch, new tokens]; IGNORED where there is none.
        budgets: number of layers run at each predicting position, from `predicting_budgets`.
        num_layers: number of layers of the model.
        total_weight: sum of token weights to divide by, where the batch is a part of a step; None: this batch's own.
        depth_weight_power: a token's weight is (budget / num_layers) ** power. Powers above 0 favour tokens with many
            layers, powers below 0 those with few.
        label_smoothing: share of the target probability that is spread over the vocabulary.
        bands: where losses are counted by depth; token weights don't apply there.

    Returns:
        A scalar.
    """
    counted = labels != IGNORED
    losses = token_losses(logits, labels, label_smoothing)
    if bands is not None:
        bands.add(losses, counted, budgets)
    weights = position_weights(budgets, num_layers, depth_weight_power, losses)
    return (losses * weights).sum() / ((counted * weights).sum() if total_weight is None else total_weight)


def position_weights(budgets: list[int], num_layers: int, power: float, like: torch.Tensor) -> torch.Tensor:
    """The weight of a token at each predicting position, [new tokens], with the dtype and device of `like`."""
    # Filled there, because the host would wait for the device to copy a list to it.
    runs = itertools.groupby((budget / num_layers) ** power for budget in budgets)
    return torch.cat([like.new_full((len(list(run)),), weight) for weight, run in runs])


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_items: torch.Tensor | int,
) -> torch.Tensor:
    """The mean Kullback-Leibler divergence, in nats, from a teacher's next-token distribution to the student's.

    Args:
        logits: logits at the positions that predict the completion, [batch, new tokens, vocabulary].
        teacher_logits: the teacher's logits, likewise.
        labels: the completions' tokens, [batch, new tokens]; IGNORED at positions that don't count.
        num_items: number of tokens to divide by.

    Returns:
        A scalar.
    """
    counted = labels != IGNORED
    divergence = _token_divergences(logits, teacher_logits)
    return (divergence * counted).sum() / num_items


def token_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Each token's cross-entropy, [batch, new tokens]; 0 where the label is IGNORED."""
    flat = logits.float().reshape(-1, logits.shape[-1])  # [batch * new tokens, vocabulary]
    losses = functional.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
    )
    return losses.view_as(labels)


def _token_divergences(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """The divergence from the teacher at every position, [batch, new tokens]."""
    student = functional.log_softmax(logits.float(), dim=-1)
    teacher = functional.log_softmax(teacher_logits.float(), dim=-1)
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
