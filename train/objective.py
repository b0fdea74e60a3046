"""The training objective: next-token loss on completions, under a schedule, seen band by band of depth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from skipdecode import SkipSchedule
from skipdecode.training.batch_layout import IGNORED
from train.exits import Exits
from train.recipe import OptimSection

BANDS = 4  # the depth is cut into as many bands for logging


@dataclass(frozen=True)
class Objective:
    """The loss that a training step minimises.

    Attributes:
        depth_weight_power, label_smoothing: as in `completion_loss`.
        distillation: share of the loss of each schedule that skips, or of each exit below the last layer, which is its
            divergence from full depth.
        exits: whether the loss is that of an exit after every layer, instead of the last one's alone.
        frozen_teacher: whether a frozen model teaches, full depth too, in place of the model's own full depth.
    """

    depth_weight_power: float = 0.0
    label_smoothing: float = 0.0
    distillation: float = 0.0
    exits: bool = False
    frozen_teacher: bool = False

    @classmethod
    def of(cls, section: OptimSection) -> "Objective":
        """The objective of a recipe."""
        return cls(
            section.depth_weight_power,
            section.label_smoothing,
            section.distillation,
            exits=section.exits == "all",
            frozen_teacher=section.teacher is not None,
        )

    def totals(self, schedules: Sequence[SkipSchedule], labels: torch.Tensor) -> torch.Tensor:
        """The divisors of a batch's losses: its tokens, and for each schedule their weights, [1 + schedules].

        Those of a step's parts and processes add up to the step's.

        Args:
            schedules, labels: as in `shares`.
        """
        tokens = (labels != IGNORED).sum(dim=0).float()  # [new tokens]
        weights = [
            column_weights(predicting_budgets(s, len(tokens)), s.num_layers, self.depth_weight_power, tokens)
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
    ) -> Iterator[torch.Tensor]:
        """The loss of each schedule of a step over their number: their sum is what the step minimises.

        With exits, the mean over the exits of the only schedule.

        One at a time, so that each can be differentiated, and its activations freed, before the next one's pass.

        Args:
            schedules: full depth, where it is among them, is the first: its output teaches the others. With exits it
                is all that there is.
            labels: of the completion, [batch, new tokens].
            run: gives logits under a schedule, from the prompt's last column on, [batch, new tokens + 1, vocabulary].
            teach: gives those of the teacher, without a gradient; called once at most.
            run_exits: gives every layer's output under a schedule; called with exits alone.
            totals: of the whole step, where this batch is a part of it; by default this batch's own.
            bands: as in `completion_loss`.
        """
        num_items, *total_weights = self.totals(schedules, labels) if totals is None else totals
        if self.exits:
            (full_depth,) = schedules
            yield self.exits_loss(run_exits(full_depth), labels, num_items=num_items, bands=bands)
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
            del logits  # else the next pass would hold them too
            yield loss / len(schedules)

    def exits_loss(
        self,
        exits: Exits,
        labels: torch.Tensor,
        *,
        num_items: torch.Tensor | int,
        bands: "DepthBands | None" = None,
    ) -> torch.Tensor:
        """The mean loss over exits after every layer, weighted ~ (layers of the exit) ** `depth_weight_power`.

        Power 1 is the training objective of CALM (Schuster et al. 2022, arXiv 2207.07061), 0 weighs all exits alike.

        Args:
            exits: of a forward pass at full depth.
            labels: of the completion, [batch, new tokens].
            num_items: tokens to divide by.
            bands: as in `completion_loss`; each exit counts in the band of its depth.
        """
        depth, counted = len(exits.hidden), labels != IGNORED
        with torch.no_grad():
            taught = exits.head(exits.hidden[-1]) if self.distillation else None
        total, weights = torch.zeros((), device=labels.device), 0.0
        for layers, hidden in enumerate(exits.hidden, start=1):
            # The logits of one exit are as large as those of a whole step without exits: they are computed again in
            # the backward pass, so that no two exits' are held at the same time.
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
            weight = (layers / depth) ** self.depth_weight_power
            total, weights = total + weight * losses.sum(), weights + weight
        return total / weights / num_items

    def _exit_losses(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        taught: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one exit's tokens: the loss against the labels, and with the teacher's share, each [batch, new tokens]."""
        logits = head(hidden)
        losses = token_losses(logits, labels, self.label_smoothing)
        if taught is None:
            return losses, losses
        divergence = _token_divergences(logits, taught) * (labels != IGNORED)
        return losses, (1 - self.distillation) * losses + self.distillation * divergence


def unpack_batch(batch: Mapping[str, Any]) -> tuple[int, dict[str, Any], torch.Tensor]:
    """A collated batch: its prompt columns, what the model is called with, and labels [batch, new tokens]."""
    prompt_columns: int = batch["prompt_columns"]
    labels = batch["labels"][:, prompt_columns:]
    columns = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    columns["logits_to_keep"] = labels.shape[1] + 1  # from the prompt's last column on
    return prompt_columns, {**columns, "use_cache": False}, labels


def predicting_budgets(schedule: SkipSchedule, new_tokens: int) -> list[int]:
    """The number of layers that ran in the column that predicts each of the first `new_tokens` generated tokens.

    Token 0 is predicted by the prompt's last column, token i + 1 by step i.
    """
    return [len(schedule.prompt_layers), *(schedule.budget(i) for i in range(new_tokens - 1))]


@dataclass
class DepthBands:
    """Sums of token losses by how deep the token's column ran, over the steps since the last `take`."""

    num_layers: int
    sums: list[float] = field(default_factory=lambda: [0.0] * BANDS)
    counts: list[float] = field(default_factory=lambda: [0.0] * BANDS)

    def band(self, budget: int) -> int:
        return min(BANDS - 1, (budget - 1) * BANDS // self.num_layers)

    def name(self, band: int) -> str:
        """Name a band by its budgets, such as `loss_layers_1_to_3`."""
        inside = [k for k in range(1, self.num_layers + 1) if self.band(k) == band]
        return f"loss_layers_{inside[0]}_to_{inside[-1]}" if inside else f"loss_band_{band}"

    def add(self, losses: torch.Tensor, counted: torch.Tensor, budgets: list[int]) -> None:
        """Count token losses [batch, new tokens] where `counted` holds; `budgets` is one number a column."""
        by_column = (losses.detach() * counted).sum(dim=0).tolist()  # one transfer from the device
        tokens = counted.sum(dim=0).tolist()
        for total, count, budget in zip(by_column, tokens, budgets, strict=True):
            self.sums[self.band(budget)] += total
            self.counts[self.band(budget)] += count

    def take(self) -> dict[str, float]:
        """The mean loss of each band since the last call; bands without a token are left out."""
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
    """The mean next-token loss over the tokens of completions; prompts and padding don't count.

    A token's loss flows into the layers that its own column ran, and through attention into those that computed the
    keys and values which these layers read; that is the exact gradient of the masked model, and nothing is cut off.

    Args:
        logits: of the columns that predict the completion, [batch, new tokens, vocabulary].
        labels: the completion's tokens, [batch, new tokens]; IGNORED where there is none.
        budgets: layers that ran in each predicting column, as `predicting_budgets` gives them.
        num_layers: layers of the model.
        total_weight: the tokens' weights to divide by, where the batch is a part of a step; by default this batch's.
        depth_weight_power: weight of a token = (budget / num_layers) ** power. Above 0 favours tokens that run deep,
            below 0 those that run few layers.
        label_smoothing: share of the target probability spread over the vocabulary.
        bands: where to count losses by depth (without smoothing's share or weights).
    """
    counted = labels != IGNORED
    losses = token_losses(logits, labels, label_smoothing)
    if bands is not None:
        bands.add(losses, counted, budgets)
    weights = column_weights(budgets, num_layers, depth_weight_power, losses)
    return (losses * weights).sum() / ((counted * weights).sum() if total_weight is None else total_weight)


def column_weights(budgets: list[int], num_layers: int, power: float, like: torch.Tensor) -> torch.Tensor:
    """The weight of a token in each predicting column, [new tokens], of the type and on the device of `like`."""
    return like.new_tensor([(budget / num_layers) ** power for budget in budgets])


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_items: torch.Tensor | int,
) -> torch.Tensor:
    """The mean Kullback-Leibler divergence, in nats, from a teacher's next-token distribution to the student's.

    Args:
        logits, teacher_logits: of the columns that predict the completion, [batch, new tokens, vocabulary].
        labels: the completion's tokens, [batch, new tokens]; IGNORED where there is none to count.
        num_items: tokens to divide by.
    """
    counted = labels != IGNORED
    divergence = _token_divergences(logits, teacher_logits)
    return (divergence * counted).sum() / num_items


def token_losses(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Each token's loss, [batch, new tokens]; 0 where there is none to count."""
    flat = logits.float().reshape(-1, logits.shape[-1])  # [batch * new tokens, vocabulary]
    losses = functional.cross_entropy(
        flat, labels.reshape(-1), ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
    )
    return losses.view_as(labels)


def _token_divergences(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Each token's divergence from the teacher, also where there is none to count, [batch, new tokens]."""
    student = functional.log_softmax(logits.float(), dim=-1)
    teacher = functional.log_softmax(teacher_logits.float(), dim=-1)
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
