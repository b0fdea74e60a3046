"""Systems that decode a test set: a checkpoint with a schedule, and its baselines."""

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
from skipdecode.generate.stopping import RowLengths, end_tokens
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over
from skipdecode.timing.agreement import agreeing_tokens
from skipdecode.timing.step_clock import TimedGeneration, generate_timed


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model and its tokenizer.

    Attributes:
        name: the folder, or the name on the Hub.
        model: the model in eval mode, on its device.
        tokenizer: the tokenizer, padding on the left.
        weights: the weight format of decode steps, as in `skip_generate`.
        gguf_file: the GGUF file that the model was read from; None for other formats.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights: Weights = "model"
    gguf_file: Path | None = None

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(decoder_layers(self.model))

    @cached_property
    def cost(self) -> CostModel:
        """The analytical cost model of its layers, LM head and KV cache."""
        return CostModel.of(self.model)

    def step_bytes(self, layers: float, context: int, rows: int) -> int:
        """Bytes that a step of `layers` layers must read, with `context` cached positions per sequence."""
        return int(self.cost.stored_as(self.weights).step_bytes(layers, context, rows))


@dataclass(frozen=True)
class DecodedBatch:
    """The result of one batch with one system.

    Attributes:
        texts: the output for each prompt.
        lengths: the number of generated tokens of each sequence, including the end token, without padding.
        prefill_seconds: time until the first token.
        decode_seconds: time from the first token to the last.
        steps: the number of decode steps.
        layers: the sum of layers over all generated tokens that were inputs.
        batch_layers: the sum over steps of the layers of the deepest sequence.
        cache_bytes: size of the allocated KV cache.
        read_bytes: bytes of weights, and of the KV cache of unfinished sequences, that decode steps must read.
        agreeing: for each output position, the number of sequences whose token is full depth's choice; None if not
            requested.
        drafted, accepted: the number of drafted tokens, and of accepted ones.
        verifications: the number of full-depth passes that verified drafts; 0 without drafts.
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
        """Generated tokens after the first of each sequence."""
        return sum(self.lengths) - len(self.lengths)

    def seconds(self, over: Over) -> float:
        """Seconds of decode, or end-to-end (prefill + decode)."""
        return self.decode_seconds + (self.prefill_seconds if over == "all" else 0.0)


class Continued(NamedTuple):
    """The result of `generate_timed`, the layers of every sequence in each step, and counts of drafts."""

    timed: TimedGeneration
    layers: Sequence[Sequence[float]]
    drafts: DraftCounts | None = None


class System(ABC):
    """A decoding method with its settings.

    Attributes:
        label: its name in tables and of its predictions file, unique in an evaluation.
        checkpoint: the model.
        kind: the decoding method.
        speedup_target: the target that it was solved for; None where the user gave its settings.
        planned: the predicted speedup where the target can't be reached; None where it can.
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
        """The schedule that its KV cache is allocated for."""

    @abstractmethod
    def _continue(self, model: GenerativeModel, request: dict[str, Any]) -> Continued:
        """Call `generate_timed` with the options `request`."""

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        lengths: Sequence[int] | None = None,
        *,
        agreement: bool = False,
    ) -> DecodedBatch:
        """Decode prompts (token ids) greedily, up to and including the end token.

        `lengths`, between 1 and `max_new_tokens`, fixes the number of generated tokens of each sequence: its own output
        continues after the end token, or is truncated. With `agreement` the outputs are compared with full depth's
        choices afterwards, untimed.
        """
        model, tokenizer = self.checkpoint.model, self.checkpoint.tokenizer
        inputs = tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(model.device)  # [batch, positions]
        prompt_columns = inputs["input_ids"].shape[1]
        ends = end_tokens(model, tokenizer)
        fixed = [] if lengths is None else [RowLengths(lengths, prompt_columns, tokenizer.eos_token_id, model.device)]
        request = {
            **inputs,
            "weights": self.checkpoint.weights,
            "max_new_tokens": max_new_tokens,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": ends if lengths is None else None,
            "stopping_criteria": fixed,
        }
        timed, layers, drafts = self._continue(model, request)
        clock, counts = timed.clock, drafts or DraftCounts()
        rows: list[list[int]] = timed.ids[:, prompt_columns:].tolist()
        if lengths is None:
            lengths = [next((n for n, token in enumerate(row, 1) if token in ends), len(row)) for row in rows]
        rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        # The last token of a sequence is never an input, so it has one step less than tokens.
        unfinished = [[n for n, row in enumerate(rows) if step + 1 < len(row)] for step in range(clock.steps)]
        allocated = self.checkpoint.cost.cache_bytes(self.cached, prompt_columns, max_new_tokens - 1, len(rows))
        return DecodedBatch(
            # Tokenizers must not remove spaces before punctuation, which training texts contain.
            texts=[
                str(tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for row in rows
            ],
            lengths=list(lengths),
            prefill_seconds=clock.prefill_seconds,
            decode_seconds=clock.decode_seconds,
            steps=clock.steps,
            layers=sum(ran[n] for ran, rows_left in zip(layers, unfinished, strict=True) for n in rows_left),
            batch_layers=sum(map(max, layers)),
            cache_bytes=allocated,
            read_bytes=sum(
                self.checkpoint.step_bytes(max(ran), prompt_columns + step, len(rows_left))
                for step, (ran, rows_left) in enumerate(zip(layers, unfinished, strict=True))
            ),
            agreeing=_by_position(agreeing_tokens(model, prompts, rows)) if agreement else None,
            drafted=counts.drafted,
            accepted=counts.taken,
            verifications=counts.rounds,
        )


def _by_position(agreeing: Sequence[Sequence[bool]]) -> list[int]:
    return [sum(flags) for flags in zip_longest(*agreeing, fillvalue=False)]


class SkipSystem(System):
    """A checkpoint with a schedule, decoded by `skip_generate`."""

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
    """Self-speculative decoding with a schedule as the draft.

    Without a schedule the best draft depth is chosen: the first layers of `order`, or those of a trained schedule.
    Layers per step are those of all draft and verification passes, divided by the number of steps.
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
