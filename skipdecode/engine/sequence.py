"""What a request of an engine asks for, prepared by transformers' own `generate`; and its answer, token by token."""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from skipdecode.errors import ConfigError, first_line
from skipdecode.generate.runners import why_no_fast_path
from skipdecode.generate.skip_generate import check_request, check_unhealed
from skipdecode.generate.stopping import Endings, limited_config
from skipdecode.internals import given_a_tokenizer
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import SkipSchedule

End = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True)
class Prepared:
    """What `generate` hands to a decoding loop for one prompt.

    Attributes:
        input_ids: the prompt [1, columns].
        processor, criteria, config: generate's own.
    """

    input_ids: torch.Tensor
    processor: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def new_tokens(self) -> int:
        """New tokens at most."""
        return int(self.config.max_length - self.input_ids.shape[1])


# Processors and criteria that keep nothing of a text, and of a prompt know its length alone.
_BY_LENGTH = {MaxLengthCriteria, EosTokenCriteria, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper}
_FIRST_DRAFTS, _MOST_AHEAD = 4, 8  # tokens that are drafted before they are verified
LEAST_TEMPERATURE = 1e-5  # below it scores overflow, and the likeliest token is all that is left anyway
MOST_KNOWN = 4096  # kinds of requests that are kept prepared
# Arguments of `generate` that are no settings of it.
_NOT_SETTINGS = (
    *("inputs", "input_ids", "attention_mask", "inputs_embeds", "position_ids", "past_key_values", "streamer"),
    *("custom_generate", "synced_gpus", "tokenizer", "assistant_model", "weights", "cuda_graphs", "draft_counts"),
)


class Preparer:
    """Has `generate` prepare prompts, with its own settings.

    What it makes of settings that are plain values, of end tokens, limits and temperatures, depends on a prompt's
    length and on nothing else of it. So it is kept: a server is asked for the same again and again, and `generate`
    takes longer to prepare a text than a small model to decode it.

    Args:
        model: which must not be changed in between.
        tokenizer: for `stop_strings`.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._known: dict[Any, Prepared] = {}
        self._defaults: dict[str, Any] = {}

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return int(self._model.get_input_embeddings().num_embeddings)

    def __call__(self, prompt: Sequence[int], settings: dict[str, Any]) -> Prepared:
        """What a prompt is decoded with. Raises ConfigError for what an engine doesn't decode."""
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty: it must have at least one token")
        vocabulary = self.vocabulary
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | Integral):
                raise ConfigError(f"the prompt holds {token!r}: token ids are integers from 0 to {vocabulary - 1}")
            if not 0 <= token < vocabulary:
                raise ConfigError(f"the prompt holds token {token}: the model knows those from 0 to {vocabulary - 1}")
        input_ids = torch.tensor([list(prompt)], device=self._model.device)
        defaults = vars(self._model.generation_config)
        if defaults != self._defaults:
            self._known.clear()
            self._defaults = copy.deepcopy(defaults)  # with its lists, which may be changed in place
        key = (len(prompt), *((name, type(value), value) for name, value in sorted(settings.items())))
        plain = all(isinstance(value, int | float | str | None) for value in settings.values())
        found = self._known.get(key) if plain else None
        if found is not None:
            return replace(found, input_ids=input_ids)
        found = self._prepare(input_ids, settings)
        if plain and {type(part) for part in (*found.processor, *found.criteria)} <= _BY_LENGTH:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def _prepare(self, input_ids: torch.Tensor, settings: dict[str, Any]) -> Prepared:
        for name in _NOT_SETTINGS:
            if settings.get(name) is not None:
                raise ConfigError(f"{name} is given: an engine takes a prompt's tokens, and settings of generate")
        check_unhealed(settings.get("token_healing", self._model.generation_config.token_healing))
        try:
            found: Prepared = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                custom_generate=_prepared,
                tokenizer=self._tokenizer,  # a checkpoint's own settings may have stop strings, too
                **settings,
            )
        except ConfigError:
            raise
        except ValueError as error:  # generate's own, for values and names that it doesn't take
            raise ConfigError(f"generate refuses these settings: {first_line(error)}") from error
        temperature = found.config.temperature
        if found.config.do_sample and temperature is not None and not LEAST_TEMPERATURE <= temperature < math.inf:
            raise ConfigError(f"temperature is {temperature}: it must be at least {LEAST_TEMPERATURE:g} to sample")
        return found


@given_a_tokenizer
def _prepared(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Prepared:
    """A `custom_generate` that decodes nothing."""
    generation_config = limited_config(generation_config, stopping_criteria)
    check_request(model, input_ids, generation_config, model_kwargs)
    if len(input_ids) > 1:
        raise ConfigError(f"num_return_sequences is {len(input_ids)}: submit so many requests, with a seed each")
    if generation_config.return_dict_in_generate:
        raise ConfigError("return_dict_in_generate is True: an engine gives tokens, and with logprobs their chances")
    if any(isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in logits_processor):
        raise ConfigError("guidance_scale is asked for: an engine runs a text once a token")
    reason = why_no_fast_path(model, generation_config, synced_gpus, model_kwargs)
    if reason is not None:
        raise ConfigError(f"an engine can't decode with this model: {reason}")
    return Prepared(input_ids, logits_processor, stopping_criteria, generation_config)


@dataclass(frozen=True)
class Chosen:
    """A token of a text.

    Attributes:
        token: its id.
        logprob: the logarithm of its probability in the model's own distribution, where logprobs were asked for.
        top: the likeliest tokens there, with theirs.
        end: what ended the text with it; None where the text goes on. After a cancellation or a failure there is no
            token (-1).
        error: what failed.
        at: when it was chosen, by `time.monotonic`.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    end: End | None = None
    error: BaseException | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Completed:
    """A text that has ended.

    Attributes:
        tokens: as `generate` gives them behind the prompt, the end token or stop string among them.
        end: what ended it.
        layers: that its tokens ran, on average, but for the first, which comes from the prompt's pass.
        waited, first_token, seconds: wall clock from its submission until it was admitted, its first token was chosen,
            and it ended; None for what didn't come to pass.
    """

    tokens: tuple[int, ...]
    end: End
    layers: float
    waited: float | None
    first_token: float | None
    seconds: float


@dataclass
class Times:
    """When a request was submitted, admitted and got its first and last token, by `time.monotonic`."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first: float | None = None
    last: float | None = None


class Answer:
    """The text of a request, while it is decoded: iterate over it for its tokens as they come, each time for all.

    Args:
        prompt_tokens: of the prompt.
        schedule: which layers its tokens run.
        plan: what its speedup is decoded with; None of lossless texts, whose speed depends on their drafts.
        listener: called with each token in place of keeping it for an iterator, in the engine's thread: it must be
            quick and raise nothing.

    Attributes:
        prompt_tokens, schedule, plan: as given.
    """

    def __init__(
        self,
        prompt_tokens: int,
        schedule: SkipSchedule,
        plan: SpeedPlan | None,
        listener: Callable[[Chosen], None] | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.schedule = schedule
        self.plan = plan
        self._times = Times()
        self._tokens: list[int] = []
        self._last: Chosen | None = None
        self._ended = threading.Event()
        self._cancelled = False
        self._kept: list[Chosen] = []
        self._came = threading.Condition()
        self._listener = listener

    def __iter__(self) -> Iterator[Chosen]:
        """The tokens as they come, up to the one that ends the text. Raises what made it fail, and ConfigError where a
        listener has them.
        """
        if self._listener is not None:
            raise ConfigError("the tokens go to the listener: nothing is kept to iterate over")
        for n in count():
            with self._came:
                self._came.wait_for(lambda: len(self._kept) > n)  # noqa: B023, it is over before the next n
            chosen = self._kept[n]
            if chosen.error is not None:
                raise chosen.error
            if chosen.end != "cancelled":
                yield chosen
            if chosen.end is not None:
                return

    def cancel(self) -> None:
        """End the text where it is; what it holds is free before the next step."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, be it after its end."""
        return self._cancelled

    @property
    def times(self) -> Times:
        """When what came to pass."""
        return self._times

    def result(self, timeout: float | None = None) -> Completed:
        """Wait for the end of the text. Raises what made it fail, and TimeoutError after so many seconds."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the text hasn't ended after {timeout} s")
        assert self._last is not None
        assert self._last.end is not None
        if self._last.error is not None:
            raise self._last.error
        times, steps = self._times, len(self._tokens) - 1
        start = times.submitted
        return Completed(
            tuple(self._tokens),
            self._last.end,
            self.schedule.mean_budget(steps) if steps > 0 else 0.0,
            times.admitted - start if times.admitted is not None else None,
            times.first - start if times.first is not None else None,
            (times.last or start) - start,
        )

    def add(self, chosen: Chosen) -> None:
        """Take a token: the engine's."""
        if chosen.token >= 0:
            self._tokens.append(chosen.token)
            self._times.first = self._times.first or chosen.at
        if chosen.end is not None:
            self._times.last = chosen.at
            self._last = chosen
        try:
            if self._listener is not None:
                self._listener(chosen)
            else:
                with self._came:
                    self._kept.append(chosen)
                    self._came.notify_all()
        except Exception:
            self._listener = None  # it isn't told of its own failure
            if chosen.end is None:
                raise
        finally:
            if chosen.end is not None:
                self._ended.set()


class Input(NamedTuple):
    """A token that a step runs: at which column of its text, and through which layers, ascending."""

    token: int
    column: int
    layers: tuple[int, ...]


class Text:
    """A request's text, of which the engine holds the columns.

    Args:
        prepared: what was asked for.
        answer: where its tokens go.
        seed: of its own generator; None for torch's own.
        logprobs: how many of the likeliest tokens to give with each; None for no probabilities at all.
        drafts: the schedule under which tokens are drafted that the answer's then verifies; None where none are.
    """

    def __init__(
        self,
        prepared: Prepared,
        answer: Answer,
        seed: int | None,
        logprobs: int | None,
        drafts: SkipSchedule | None = None,
    ) -> None:
        self.answer = answer
        self.schedule = answer.schedule
        self._drafts = drafts
        self._drafted: list[int] = []  # tokens behind the text, to be verified
        self._to_draft = _FIRST_DRAFTS
        self._verifies = True  # what the prompt's pass chooses is full depth's
        self.steps = prepared.new_tokens - 1  # at most: the last token is never an input
        self.cutoffs = self.schedule.cutoffs(self.steps)
        self.do_sample = bool(prepared.config.do_sample)
        self.processor = prepared.processor
        self.logprobs = logprobs
        self.plain = not self.do_sample and not prepared.processor
        self.prompt = prepared.input_ids
        device = self.prompt.device
        columns = self.prompt.shape[1]
        self._ids = torch.empty(1, columns + prepared.new_tokens, dtype=torch.int64, device=device)
        self._ids[:, :columns] = self.prompt
        self.columns = columns  # of prompt and text so far
        self.last = int(prepared.input_ids[0, -1])  # token of them
        self._sets: dict[int, tuple[int, ...]] = {}
        self.generator: torch.Generator | None = None
        if self.do_sample and seed is not None:
            self.generator = torch.Generator(device).manual_seed(seed)
        self._ends = Endings(prepared.criteria, 1)
        self._limit = columns + prepared.new_tokens

    @property
    def step(self) -> int:
        """The number of the token that is run next, among the generated ones."""
        return self.columns - self.prompt.shape[1] - 1

    def inputs(self, *, drafting: bool) -> list[Input]:
        """What is run next: the last token, one that was drafted, or all of them to be verified.

        Args:
            drafting: whether tokens may be drafted, where the text is one that drafts.
        """
        if self._drafts is None:
            return [Input(self.last, self.columns - 1, self._layers(self.schedule, self.step))]
        drafted = self._drafted
        self._verifies = not drafting or len(drafted) >= min(self._to_draft, self._limit - self.columns - 1)
        if self._verifies:
            layers = self._layers(self.schedule, self.step)
            return [Input(token, self.columns - 1 + n, layers) for n, token in enumerate([self.last, *drafted])]
        token, at = (drafted or [self.last])[-1], len(drafted)
        return [Input(token, self.columns - 1 + at, self._layers(self._drafts, self.step + at))]

    def _layers(self, schedule: SkipSchedule, step: int) -> tuple[int, ...]:
        budget = schedule.budget(step)
        found = self._sets.get(budget)
        if found is None:
            found = self._sets[budget] = schedule.layers_for(budget)
        return found

    def take(self, greedy: list[int], logits: torch.Tensor) -> bool:
        """Go on by what `inputs` gave. Returns whether the text ends.

        Args:
            greedy: the likeliest token behind each.
            logits: [inputs, vocabulary] in float32.
        """
        if self._drafts is not None and not self._verifies:
            self._drafted.append(greedy[0])
            return False
        drafted, self._drafted = self._drafted, []
        for n in range(len(greedy)):
            own = logits[n : n + 1]
            token = greedy[n] if self.plain else self.choose(own)
            if self.extend(token, own):
                return True
            if n < len(drafted) and token != drafted[n]:
                self._to_draft = n + 1  # what agreed, and one more
                return False
        if drafted:
            self._to_draft = min(len(drafted) + 1, _MOST_AHEAD)
        return False

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, of logits [1, vocabulary] in float32."""
        scores = self.processor(self._ids[:, : self.columns], logits.clone())  # type: ignore[arg-type]
        if not self.do_sample:
            return int(scores.argmax(dim=-1))
        probabilities = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, num_samples=1, generator=self.generator))

    def extend(self, token: int, logits: torch.Tensor) -> bool:
        """Add a token, chosen of `logits` [1, vocabulary]. Returns whether the text ends with it."""
        self._ids[0, self.columns] = self.last = token
        self.columns += 1
        ids = self._ids[:, : self.columns]
        ends = self._ends(ids, None)[0]
        end: End | None = None
        if ends:
            end = "length" if self._ends.by_length(ids) else "stop"
        self.answer.add(self._chosen(token, logits, end))
        return ends

    def _chosen(self, token: int, logits: torch.Tensor, end: End | None) -> Chosen:
        if self.logprobs is None:
            return Chosen(token, end=end)
        logprobs = logits[0].log_softmax(-1)
        values, tokens = logprobs.topk(self.logprobs)
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return Chosen(token, float(logprobs[token]), top, end)
