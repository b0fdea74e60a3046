"""Systems that decode a test set, behind one interface: a checkpoint under a schedule, and its rivals."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.results import SystemKind
from skipdecode import CostModel, SkipSchedule, skip_generate
from skipdecode.families import decoder_layers
from skipdecode.generate.lossless_loop import DraftCounts
from skipdecode.generate.request import GenerativeModel
from skipdecode.generate.stopping import RowLengths
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over
from skipdecode.timing.agreement import agreeing_tokens
from skipdecode.timing.step_clock import TimedGeneration, generate_timed


@dataclass(frozen=True)
class Checkpoint:
    """A model to decode with.

    Attributes:
        name: its folder, or its name on the Hub.
        model: in eval mode, on its device.
        tokenizer: which pads on the left.
        weights: what decode steps compute with, as in `skip_generate`.
        gguf_file: the file that it was read from, where that is GGUF.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights: Weights = "model"
    gguf_file: Path | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(decoder_layers(self.model))

    @cached_property
    def cost(self) -> CostModel:
        """The sizes of its layers, head and cache."""
        return CostModel.of(self.model)

    def step_bytes(self, layers: float, context: int, rows: int) -> int:
        """Bytes that a step of `layers` layers must read, with `context` columns cached for each of `rows` rows."""
        return int(self.cost.stored_as(self.weights).step_bytes(layers, context, rows))


@dataclass(frozen=True)
class DecodedBatch:
    """One batch as one system decoded it.

    Attributes:
        texts: what each prompt was continued with.
        lengths: how many tokens each row generated, an end token included, padding not.
        prefill_seconds: up to the first token.
        decode_seconds: from there to the last.
        steps: decode steps of the batch.
        layers: layers that tokens ran as inputs, summed over tokens.
        batch_layers: layers that the batch ran, summed over steps: those of the row that went deepest.
        cache_bytes: of keys and values.
        read_bytes: of weights, and of the cache of rows whose text went on, that the steps had to read.
        agreeing: for each new token's place in a text, rows whose token there is the one that full depth would have
            chosen; None where that wasn't asked for.
        drafted, accepted: tokens that were drafted, and those of them that stand in the texts.
        verifications: passes that verified them; 0 where nothing was drafted.
    """

    texts: list[str]
    lengths: list[int]
    prefill_seconds: float
    decode_seconds: float
    steps: int
    layers: float
    batch_layers: float
    cache_bytes: int
    read_bytes: int = 0
    agreeing: list[int] | None = None
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0

    @property
    def tokens(self) -> int:
        """Generated tokens after the first of each row."""
        return sum(self.lengths) - len(self.lengths)

    def seconds(self, over: Over) -> float:
        """Of decoding, or of prefill and decoding together."""
        return self.decode_seconds + (self.prefill_seconds if over == "all" else 0.0)


class Continued(NamedTuple):
    """What a system passed to `generate_timed` gave, the layers of every row in each step, and what was drafted."""

    timed: TimedGeneration
    layers: Sequence[Sequence[float]]
    drafts: DraftCounts | None = None


class System(ABC):
    """Something that continues prompts, and takes turns with others.

    Attributes:
        label: its name in tables and of its predictions file; no two in an evaluation are alike.
        checkpoint: what it decodes with.
        kind: how.
        speedup_target: what it was made for; None where it was named by its settings.
        planned: the speedup that is expected in place of a target that can't be reached; None where it can.
    """

    kind: SystemKind

    def __init__(
        self, label: str, checkpoint: Checkpoint, speedup_target: float | None = None, planned: float | None = None
    ) -> None:
        self.label = label
        self.checkpoint = checkpoint
        self.speedup_target = speedup_target
        self.planned = planned

    @property
    @abstractmethod
    def cached(self) -> SkipSchedule:
        """The schedule that its cache is planned for (law 6)."""

    @abstractmethod
    def _continue(self, model: GenerativeModel, request: dict[str, Any]) -> Continued:
        """Pass `request` to `generate_timed`."""

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        lengths: Sequence[int] | None = None,
        *,
        agreement: bool = False,
    ) -> DecodedBatch:
        """Continue prompts, token ids, greedily up to and with the end token.

        With `lengths`, of 1 to `max_new_tokens`, every row generates so many tokens in place of that: its own text goes
        on behind its end token, or is cut. With `agreement` the texts are then held against full depth, untimed.
        """
        model, tokenizer = self.checkpoint.model, self.checkpoint.tokenizer
        inputs = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(model.device)  # [batch, columns]
        prompt_columns = inputs["input_ids"].shape[1]
        end_token = tokenizer.eos_token_id
        ends = [] if lengths is None else [RowLengths(lengths, prompt_columns, end_token, model.device)]
        request = {
            **inputs,
            "weights": self.checkpoint.weights,
            "max_new_tokens": max_new_tokens,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": end_token if lengths is None else None,
            "stopping_criteria": ends,
        }
        timed, layers, drafts = self._continue(model, request)
        clock, counts = timed.clock, drafts or DraftCounts()
        rows: list[list[int]] = timed.ids[:, prompt_columns:].tolist()
        if lengths is None:
            lengths = [row.index(end_token) + 1 if end_token in row else len(row) for row in rows]
        rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        # A row's last token is never an input, so its steps are one less than its tokens.
        going = [[n for n, row in enumerate(rows) if step + 1 < len(row)] for step in range(clock.steps)]
        held = self.checkpoint.cost.cache_bytes(self.cached, prompt_columns, max_new_tokens - 1, len(rows))
        return DecodedBatch(
            # As they are trained on, also by a tokenizer that takes blanks before punctuation away.
            texts=[
                str(tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for row in rows
            ],
            lengths=list(lengths),
            prefill_seconds=clock.prefill_seconds,
            decode_seconds=clock.decode_seconds,
            steps=clock.steps,
            layers=sum(ran[n] for ran, rows_left in zip(layers, going, strict=True) for n in rows_left),
            batch_layers=sum(map(max, layers)),
            cache_bytes=held,
            read_bytes=sum(
                self.checkpoint.step_bytes(max(ran), prompt_columns + step, len(rows_left))
                for step, (ran, rows_left) in enumerate(zip(layers, going, strict=True))
            ),
            agreeing=_by_place(agreeing_tokens(model, prompts, rows)) if agreement else None,
            drafted=counts.drafted,
            accepted=counts.taken,
            verifications=counts.rounds,
        )


def _by_place(agreeing: Sequence[Sequence[bool]]) -> list[int]:
    """How many of several rows are true at each place."""
    return [sum(place) for place in zip_longest(*agreeing, fillvalue=False)]


class SkipSystem(System):
    """A checkpoint under a schedule, by `skip_generate`."""

    def __init__(
        self,
        label: str,
        checkpoint: Checkpoint,
        schedule: SkipSchedule,
        speedup_target: float | None = None,
        planned: float | None = None,
    ) -> None:
        super().__init__(label, checkpoint, speedup_target, planned)
        self.schedule = schedule
        self.kind = "skip" if schedule.skips else "full depth"

    @property
    def cached(self) -> SkipSchedule:
        return self.schedule

    def _continue(self, model: GenerativeModel, request: dict[str, Any]) -> Continued:
        timed = generate_timed(model, **request, custom_generate=skip_generate, schedule=self.schedule)
        batch = len(request["input_ids"])
        return Continued(timed, [[self.schedule.budget(i)] * batch for i in range(timed.clock.steps)])


class LosslessSystem(System):
    """A checkpoint at full depth, drafted under a schedule, or by as many layers as pay where there is none: the first
    ones of an order, or of the speed that the checkpoint was trained for.

    Layers are those of all passes, over its steps.
    """

    def __init__(
        self,
        label: str,
        checkpoint: Checkpoint,
        schedule: SkipSchedule | None,
        planned: float | None = None,
        *,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__(label, checkpoint, planned=planned)
        self.kind = "lossless"
        self.schedule = schedule
        self.order = order

    @property
    def cached(self) -> SkipSchedule:
        return SkipSchedule.full_depth(self.checkpoint.num_layers)

    def _continue(self, model: GenerativeModel, request: dict[str, Any]) -> Continued:
        counts = DraftCounts()
        drafts: dict[str, Any] = {"schedule": self.schedule, "order": self.order, "draft_counts": counts}
        timed = generate_timed(model, **request, custom_generate=skip_generate, lossless=True, **drafts)
        steps = timed.clock.steps
        return Continued(timed, [[counts.layers / max(1, steps)] * len(request["input_ids"])] * steps, counts)
