"""A sequence that an engine decodes, and the answer that receives its tokens."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

import torch

from skipdecode.engine.prepare import PreparedRequest
from skipdecode.errors import ConfigError
from skipdecode.generate.acceptance import accepted_tokens
from skipdecode.generate.draft_policy import MAX_DRAFTS, AcceptedPlusOne, DraftPolicy, VerifiedRound
from skipdecode.generate.stopping import Endings
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import SkipSchedule

End = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class GeneratedToken:
    """A token that was generated, or the event that ended its sequence.

    Attributes:
        token: token id; -1 if the sequence ended without one, because it was cancelled or failed.
        logprob: log probability by the model's own distribution, if logprobs were requested.
        top: the likeliest tokens at this position with their log probabilities, if they were requested.
        end: why the sequence ended with this token; None if it continues.
        error: why the sequence failed, if it did.
        at: when the token was generated, by `time.monotonic`.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    end: End | None = None
    error: BaseException | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class CompletedRequest:
    """The result of a request that has ended.

    Attributes:
        tokens: the new tokens, as `generate` returns them after the prompt: with the end token or stop string.
        end: why the sequence ended.
        layers: mean number of layers per token, without the first token, which comes from the prefill.
        waited: seconds from submission until the request was admitted; None if it never was.
        first_token: seconds from submission until the first token; None if there is none.
        seconds: from submission until the end.
    """

    tokens: tuple[int, ...]
    end: End
    layers: float
    waited: float | None
    first_token: float | None
    seconds: float


@dataclass
class Times:
    """When a request was submitted and admitted, and when its first and last token came, by `time.monotonic`."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None
    last: float | None = None


class Answer:
    """The answer to a request. Iterating over it gives the tokens as they are generated, from the first one each time.

    Args:
        prompt_tokens: length of the prompt.
        schedule: the layers that the tokens of the answer run.
        plan: how the requested speedup is decoded; None if the answer is lossless, as its speed depends on the
            acceptance rate of its drafts.
        listener: called with each token, in the engine's thread, in place of keeping it for iteration. It must return
            quickly and raise nothing.

    Attributes:
        prompt_tokens, schedule, plan: as given.
        times: when the request was submitted, admitted, and got its tokens.
        cancelled: whether `cancel` was called, even after the end.
    """

    def __init__(
        self,
        prompt_tokens: int,
        schedule: SkipSchedule,
        plan: SpeedPlan | None,
        listener: Callable[[GeneratedToken], None] | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.schedule = schedule
        self.plan = plan
        self.times = Times()
        self._tokens: list[int] = []
        self._last: GeneratedToken | None = None
        self._ended = threading.Event()
        self.cancelled = False
        self._kept: list[GeneratedToken] = []
        self._changed = threading.Condition()
        self._listener = listener

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Iterate over the tokens, waiting for each.

        Raises:
            ConfigError: if a listener receives the tokens.
            BaseException: the error that made the sequence fail.
        """
        if self._listener is not None:
            raise ConfigError("the tokens go to the listener: they are not kept for iteration")
        for n in count():
            with self._changed:
                self._changed.wait_for(lambda: len(self._kept) > n)  # noqa: B023, called before n changes
            generated = self._kept[n]
            if generated.error is not None:
                raise generated.error
            if generated.end != "cancelled":
                yield generated
            if generated.end is not None:
                return

    def cancel(self) -> None:
        """Have the sequence end; its memory is free before the next step."""
        self.cancelled = True

    def result(self, timeout: float | None = None) -> CompletedRequest:
        """Wait for the end of the sequence.

        Args:
            timeout: maximum seconds to wait; by default there is no limit.

        Raises:
            TimeoutError: if the sequence hasn't ended by then.
            BaseException: the error that made the sequence fail.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the sequence hasn't ended after {timeout} s")
        assert self._last is not None
        assert self._last.end is not None
        if self._last.error is not None:
            raise self._last.error
        times, steps = self.times, len(self._tokens) - 1
        start = times.submitted
        return CompletedRequest(
            tuple(self._tokens),
            self._last.end,
            self.schedule.mean_budget(steps) if steps > 0 else 0.0,
            times.admitted - start if times.admitted is not None else None,
            times.first - start if times.first is not None else None,
            (times.last or start) - start,
        )

    def add(self, generated: GeneratedToken) -> None:
        """Add a token. For the engine only."""
        if generated.token >= 0:
            self._tokens.append(generated.token)
            self.times.first = self.times.first or generated.at
        if generated.end is not None:
            self.times.last = generated.at
            self._last = generated
        try:
            if self._listener is not None:
                self._listener(generated)
            else:
                with self._changed:
                    self._kept.append(generated)
                    self._changed.notify_all()
        except Exception:
            self._listener = None  # it must not be called with its own failure
            if generated.end is None:
                raise
        finally:
            if generated.end is not None:
                self._ended.set()


class TokenInput(NamedTuple):
    """A token that a step runs, its position in its sequence, and the layers that it runs, ascending."""

    token: int
    position: int
    layers: tuple[int, ...]


class EngineSequence:
    """The prompt and the new tokens of one request.

    Args:
        seed: of the sequence's own random generator; None to sample from torch's global one.
        logprobs: how many of the likeliest tokens to report with each token; None for no probabilities at all.
        draft_schedule: drafts tokens, which the schedule of the answer verifies; None to draft nothing.

    Attributes:
        prompt: token ids, [1, prompt length].
        length: tokens of the prompt and new tokens so far.
        max_steps: maximum number of decode steps; one less than new tokens, as the last one is never an input.
        cutoffs: for each layer, how many new tokens run it.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        answer: Answer,
        seed: int | None,
        logprobs: int | None,
        draft_schedule: SkipSchedule | None = None,
    ) -> None:
        self.answer = answer
        self.schedule = answer.schedule
        self.prompt = prepared.input_ids
        self.length = self.prompt.shape[1]
        self.max_steps = prepared.new_tokens - 1
        self.cutoffs = self.schedule.cutoffs(self.max_steps)
        self._draft_schedule = draft_schedule
        self._drafts: list[int] = []  # tokens that follow the last one and are still to be verified
        self._draft_policy: DraftPolicy = AcceptedPlusOne()
        self._drafts_wanted = 0  # drafts of this round
        self._verifying = True  # the prefill's token counts as verified
        self._processor = prepared.processor
        self._do_sample = bool(prepared.config.do_sample)
        self._logprobs = logprobs
        self._max_length = self.length + prepared.new_tokens
        device = self.prompt.device
        self._token_ids = torch.empty(1, self._max_length, dtype=torch.int64, device=device)
        self._token_ids[:, : self.length] = self.prompt
        self._last_token = int(self.prompt[0, -1])
        self._layer_sets: dict[int, tuple[int, ...]] = {}  # by budget
        self._generator: torch.Generator | None = None
        if self._do_sample and seed is not None:
            self._generator = torch.Generator(device).manual_seed(seed)
        self._endings = Endings(prepared.criteria, 1)

    @property
    def step(self) -> int:
        """The index, among the new tokens, of the next token that is run."""
        return self.length - self.prompt.shape[1] - 1

    @property
    def slots(self) -> list[int]:
        """KV slots needed in each layer: those of the prompt and of all new tokens that run it, or 0 if none does."""
        prompt_length, on_prompt = self.prompt.shape[1], set(self.schedule.prompt_layers)
        return [prompt_length + cutoff if n in on_prompt else 0 for n, cutoff in enumerate(self.cutoffs)]

    def next_inputs(self, *, drafting: bool) -> list[TokenInput]:
        """The inputs of the next step: the last token, the last draft if `drafting`, or all drafts to be verified."""
        if self._draft_schedule is None:
            return [TokenInput(self._last_token, self.length - 1, self._layers(self.schedule, self.step))]
        drafts = self._drafts
        if not drafts:
            room = min(MAX_DRAFTS, self._max_length - self.length - 1)
            budgets = [self._draft_schedule.budget(self.step + n) for n in range(room)]
            self._drafts_wanted = len(self._draft_policy.rule(1, budgets).min_probabilities)
        self._verifying = not drafting or len(drafts) >= self._drafts_wanted
        if self._verifying:
            layers = self._layers(self.schedule, self.step)
            tokens = [self._last_token, *drafts]
            return [TokenInput(token, self.length - 1 + n, layers) for n, token in enumerate(tokens)]
        token, at = (drafts or [self._last_token])[-1], len(drafts)
        return [TokenInput(token, self.length - 1 + at, self._layers(self._draft_schedule, self.step + at))]

    def _layers(self, schedule: SkipSchedule, step: int) -> tuple[int, ...]:
        budget = schedule.budget(step)
        layers = self._layer_sets.get(budget)
        if layers is None:
            layers = self._layer_sets[budget] = schedule.layers_for(budget)
        return layers

    def advance(self, greedy: list[int], logits: torch.Tensor) -> bool:
        """Add the tokens that a step has generated, or a draft. Returns whether the sequence has ended.

        Args:
            greedy: the likeliest token after each of the inputs that `next_inputs` returned.
            logits: of the same, [inputs, vocabulary] in float32.
        """
        if self._draft_schedule is not None and not self._verifying:
            self._drafts.append(greedy[0])
            return False
        drafts, self._drafts = self._drafts, []
        choosing = self._do_sample or bool(self._processor)
        chosen = (self._choose(logits[n : n + 1]) if choosing else token for n, token in enumerate(greedy))
        accepted = 0
        for accepted, token in enumerate(accepted_tokens(drafts, chosen)):
            if self._append(token, logits[accepted : accepted + 1]):
                return True
        if drafts:
            self._draft_policy.learn(VerifiedRound(1, accepted + 1, [len(drafts)], [accepted]))
        return False

    def _choose(self, logits: torch.Tensor) -> int:
        """Apply the logits processors and choose the next token, given logits [1, vocabulary] in float32."""
        scores = self._processor(self._token_ids[:, : self.length], logits.clone())  # type: ignore[arg-type]
        if not self._do_sample:
            return int(scores.argmax(dim=-1))
        probabilities = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))

    def _append(self, token: int, logits: torch.Tensor) -> bool:
        """Append a token, chosen by logits [1, vocabulary]. Returns whether the sequence ends with it."""
        self._token_ids[0, self.length] = self._last_token = token
        self.length += 1
        token_ids = self._token_ids[:, : self.length]
        ended = self._endings(token_ids, None)[0]
        end: End | None = None
        if ended:
            end = "length" if self._endings.by_length(token_ids) else "stop"
        if self._logprobs is None:
            self.answer.add(GeneratedToken(token, end=end))
        else:
            logprobs = logits[0].log_softmax(-1)
            values, tokens = logprobs.topk(self._logprobs)
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            self.answer.add(GeneratedToken(token, float(logprobs[token]), top, end))
        return ended
