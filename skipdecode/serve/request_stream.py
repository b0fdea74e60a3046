"""A request while it runs: its sequences in the engine, and their text in the order in which it is generated."""

import asyncio
import contextlib
import functools
import json
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import LogitsProcessorList

from skipdecode.checkpoint.chat_template import chat_ids, render_chat
from skipdecode.engine.engine import Engine, EngineClosed, EngineFull
from skipdecode.engine.sequence import Answer, GeneratedToken
from skipdecode.errors import ConfigError
from skipdecode.families import longest_sequence
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.serve.detokenizer import Detokenizer
from skipdecode.serve.json_output import JSONGrammars, JSONMask
from skipdecode.serve.metrics import Metrics
from skipdecode.serve.prompt_scores import PromptScorer
from skipdecode.serve.protocol import APIError, BaseRequest, ChatRequest, CompletionRequest
from skipdecode.serve.settings import ServeSettings
from skipdecode.serve.token_penalties import TokenPenalties
from skipdecode.serve.tool_calls import ToolCallParser, check_tool_template


@dataclass
class Choice:
    """One sequence of a request.

    Attributes:
        index: among the request's sequences.
        tokens: new tokens so far.
        end: why the sequence ended, in OpenAI's terms; None while it decodes.
        layers: layers run so far, without the first token, which comes from the prefill.
        last: when the last token came, by `time.monotonic`.
        echo: the prompt, if the text begins with it.
        logprobs: the tokens with their log probabilities, if the request wants them; those of an echo come first.
        offsets: for each of these tokens, the number of characters before it.
        parser: separates tool calls from the text, if the request has tools.
    """

    index: int
    answer: Answer
    detokenizer: Detokenizer
    tokens: int = 0
    end: str | None = None
    layers: int = 0
    last: float | None = None
    echo: str = ""
    logprobs: list[GeneratedToken] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parser: ToolCallParser | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return self.echo + (self.parser.content if self.parser is not None else self.detokenizer.text)


@dataclass(frozen=True)
class Chunk:
    """What one sequence gained.

    Attributes:
        text: new text; may be empty.
        generated: the token, or the last of several.
        layers: layers that this token ran.
        place: index of this token in the sequence's `logprobs`.
        end: why the sequence ended with it, in OpenAI's terms; None if it continues.
        calls: new tool calls, in OpenAI's form.
    """

    choice: Choice
    text: str
    generated: GeneratedToken
    layers: int
    place: int
    end: str | None
    calls: Sequence[dict[str, Any]] = ()


class Waker:
    """Sets events of the running event loop from other threads. Each call into the loop serves all events set by then,
    as it costs a write to a socket.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[asyncio.Event] = deque()
        self._scheduled = False

    def wake(self, event: asyncio.Event) -> None:
        """Have the loop set an event."""
        self._events.append(event)
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        self._scheduled = False  # before the events are read: later ones need another call
        while self._events:
            self._events.popleft().set()


class TokenQueue:
    """Passes tokens from the engine's thread to a task of the event loop, which gets a TimeoutError after `seconds`.

    The task is woken for each token (`each`), or only at the end of each sequence.
    """

    def __init__(self, waker: Waker, *, each: bool, seconds: float) -> None:
        self._waker = waker
        self._each = each
        self._tokens: deque[tuple[int, GeneratedToken]] = deque()
        self._ready = asyncio.Event()
        self._waking = False
        self._expired = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._ready.set()

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def put(self, index: int, generated: GeneratedToken) -> None:
        """Add a token of sequence `index`. Called by the engine's thread."""
        self._tokens.append((index, generated))
        if not self._waking and (self._each or generated.end is not None):
            self._waking = True
            self._waker.wake(self._ready)

    async def get(self) -> list[tuple[int, GeneratedToken]]:
        """Wait for tokens and return all that have come. Raises TimeoutError after `seconds`."""
        await self._ready.wait()
        if self._expired:
            raise TimeoutError
        self._ready.clear()
        self._waking = False  # before the tokens are read: later ones wake the task again
        return [self._tokens.popleft() for _ in range(len(self._tokens))]


class RunningRequest:
    """The sequences of one request."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: ServeSettings,
        metrics: Metrics,
        waker: Waker,
        scorer: PromptScorer,
        grammars: JSONGrammars,
        body: BaseRequest,
    ) -> None:
        self._engine, self._tokenizer, self._settings, self._metrics = engine, tokenizer, settings, metrics
        self._scorer, self._grammars = scorer, grammars
        self._matcher: Any = None  # of the text that the sequences must have
        self.body = body
        self.speedup = settings.speedup if body.speedup is None else body.speedup
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self._queue = TokenQueue(waker, each=body.stream or bool(body.stop), seconds=settings.timeout)
        # Whether a chunk has one token, and not all tokens of a sequence that have come together.
        self._token_by_token = bool(body.stop) or body.details or body.logprobs_count is not None

    async def start(self) -> None:
        """Submit all sequences to the engine. Raises ConfigError and APIError, and submits none, if that can't be."""
        try:
            self.body.check()
            if self._engine.full:  # checked first, as a request that is refused should cost little
                raise EngineFull("the maximum number of requests is waiting")
            prompts = self._prompts()
            count = len(prompts) * self.body.n
            maximum = min(self._settings.max_sequences, self._engine.most_waiting)  # the engine refuses more each time
            if count > maximum:
                raise ConfigError(
                    f"{len(prompts)} prompts with n = {self.body.n} are {count} sequences: a request may have at most "
                    f"{maximum}"
                )
            self.prompt_tokens = sum(map(len, prompts))
            schema = self.body.response_format.schema_of_answer
            if schema is not None:  # in another thread, as a large schema takes a while
                self._matcher = await asyncio.to_thread(self._grammars.matcher, schema)
            if count > 1:  # in another thread, so that other requests' tokens are sent in the meantime
                await asyncio.to_thread(self._submit, prompts)
            else:
                self._submit(prompts)
            if isinstance(self.body, CompletionRequest) and self.body.echo:
                await self._echo(self.body, prompts)
        except EngineFull as error:
            self.cancel()
            raise APIError(429, f"the server is busy: {error}", "queue_full", headers={"Retry-After": "1"}) from error
        except EngineClosed as error:
            self.cancel()
            # Closing the connection makes a client that retries reach another server behind a load balancer.
            headers = {"Retry-After": "1", "Connection": "close"}
            raise APIError(503, str(error), "shutting_down", headers=headers) from error
        except ConfigError as error:
            self.cancel()
            message = str(error).replace("max_new_tokens", self.body.length_field)
            raise APIError(400, message, "invalid_value", self._field_of(message)) from error
        except BaseException:
            self.cancel()
            raise

    def _field_of(self, message: str) -> str | None:
        """The first field of the request that a message names."""
        named = re.findall(r"\w+", message)
        if isinstance(self.body, ChatRequest):
            named = ["messages" if name == "prompt" else name for name in named]
        fields = type(self.body).model_fields.keys() - {"model"}  # a word that messages use in its plain sense
        return next((name for name in named if name in fields), None)

    def _prompts(self) -> list[list[int]]:
        if isinstance(self.body, ChatRequest):
            return [self._chat(self.body)]
        assert isinstance(self.body, CompletionRequest)
        return [list(self._tokenised(p)) if isinstance(p, str) else p for p in self.body.prompt]

    def _tokenised(self, prompt: str) -> Sequence[int]:
        _check_unicode("the prompt", prompt)
        tokens: Sequence[int] = self._tokenizer(prompt, verbose=False)["input_ids"]
        return tokens

    def _chat(self, body: ChatRequest) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise APIError(
                400, "this checkpoint's tokenizer has no chat template: use /v1/completions", "no_chat_template"
            )
        try:
            messages = [message.plain() for message in body.messages]
            text = json.dumps(messages, ensure_ascii=False)
        except (RecursionError, ValueError) as error:  # pydantic raises ValueError
            raise APIError(400, "messages: they are nested too deeply", "invalid_value", "messages") from error
        _check_unicode("messages", text)
        tools = body.callable_tools
        if tools:
            check_tool_template(self._tokenizer, tools)
            _check_unicode("tools", json.dumps(tools, ensure_ascii=False))
        try:
            return chat_ids(self._tokenizer, render_chat(self._tokenizer, messages, tools=tools or None))
        except ConfigError as error:
            raise APIError(400, str(error), param="messages") from error

    def _submit(self, prompts: Sequence[list[int]]) -> None:
        body, settings = self.body, self._settings
        new_tokens = settings.new_tokens if body.new_tokens is None else max(1, body.new_tokens)
        if new_tokens > settings.max_new_tokens:
            raise ConfigError(
                f"{body.length_field} is {new_tokens}: the maximum on this server is {settings.max_new_tokens}"
            )
        for token in body.logit_bias or ():
            if not 0 <= token < self._engine.vocabulary:
                last = self._engine.vocabulary - 1
                raise ConfigError(f"logit_bias names token {token}: the model's token ids go from 0 to {last}")
        sampling = body.sampling
        positions = longest_sequence(self._engine.model.config)
        for prompt in prompts:
            if body.new_tokens is None and positions is not None:  # a chat may fill all positions of the model
                new_tokens = max(1, min(settings.new_tokens, positions + 1 - len(prompt)))
            for n in range(body.n):
                index = len(self.choices)
                seed = None
                if sampling["do_sample"]:
                    # The sequences of a request differ; the first one has the given seed.
                    seed = secrets.randbits(63) if body.seed is None else body.seed + n
                answer = self._engine.submit(
                    prompt,
                    # At 1x there is no draft schedule: the engine chooses the best draft depth.
                    speedup=None if body.lossless and self.speedup == 1 else self.speedup,
                    strict=settings.strict,
                    over=body.over or (settings.over if body.speedup is None and not body.lossless else None),
                    seed=seed,
                    logprobs=body.logprobs_count,
                    listener=functools.partial(self._queue.put, index),
                    lossless=body.lossless,
                    max_new_tokens=new_tokens,
                    **self._processors(len(prompt)),
                    **sampling,
                )
                choice = Choice(index, answer, Detokenizer(self._tokenizer, body.stop))
                if isinstance(body, ChatRequest) and body.callable_tools:
                    choice.parser = ToolCallParser(single=not body.parallel_tool_calls)
                self.choices.append(choice)

    async def _echo(self, body: CompletionRequest, prompts: Sequence[list[int]]) -> None:
        """Begin the text of each sequence with its prompt."""
        for n, prompt in enumerate(prompts):
            decoded, offsets = Detokenizer(self._tokenizer, ()), []
            for place, token in enumerate(prompt, 1):
                offsets.append(decoded.decoded_length)
                decoded.add([token], last=place == len(prompt))
            given = body.prompt[n]
            scored: list[GeneratedToken] = []
            choices = self.choices[n * body.n : (n + 1) * body.n]
            if body.logprobs is not None:
                scored = await self._scorer(prompt, choices[0].answer.schedule, body.logprobs)
            for choice in choices:
                choice.echo = given if isinstance(given, str) else decoded.text
                choice.logprobs, choice.offsets = list(scored), offsets[: len(scored)]

    def _processors(self, prompt_length: int) -> dict[str, Any]:
        """The setting of `generate` for what changes the logits of one sequence; empty if nothing does."""
        body = self.body
        processors = LogitsProcessorList()
        if body.presence_penalty or body.frequency_penalty:
            processors.append(TokenPenalties(prompt_length, body.presence_penalty, body.frequency_penalty))
        if self._matcher is not None:
            processors.append(JSONMask(self._matcher.deep_copy(), prompt_length))
        return {"logits_processor": processors} if processors else {}

    async def chunks(self) -> AsyncIterator[list[Chunk]]:
        """The chunks of all sequences, as they come, until the last sequence has ended.

        Raises APIError if a sequence fails, or the request takes too long.
        """
        try:
            while any(choice.end is None for choice in self.choices):
                try:
                    received = await self._queue.get()
                except TimeoutError as error:
                    seconds = self._settings.timeout
                    raise APIError(504, f"the request took more than {seconds:g} s", "timeout") from error
                by_choice: dict[int, list[GeneratedToken]] = {}
                for index, generated in received:
                    by_choice.setdefault(index, []).append(generated)
                yield [
                    chunk for index, tokens in by_choice.items() for chunk in self._chunks(self.choices[index], tokens)
                ]
        finally:
            self.cancel()

    def _chunks(self, choice: Choice, tokens: list[GeneratedToken]) -> Iterator[Chunk]:
        for new in [[token] for token in tokens] if self._token_by_token else [tokens]:
            if choice.end is not None:
                return  # it was cancelled at a stop after another token had been generated
            last = new[-1]
            if last.error is not None:
                raise APIError(500, "decoding failed: see the server's log", "failed") from last.error
            if last.end == "cancelled":
                raise APIError(503, "the server is shutting down", "shutting_down")
            yield self._chunk(choice, new)

    def _chunk(self, choice: Choice, new: Sequence[GeneratedToken]) -> Chunk:
        schedule, last = choice.answer.schedule, new[-1]
        layers = schedule.prompt_budget
        if self.body.new_tokens == 0:  # the engine generates one token, which shows that the prompt fits and has run
            choice.end = "length"
            return Chunk(choice, "", last, layers, 0, choice.end)
        for generated in new:
            if choice.tokens:
                layers = schedule.budget(choice.tokens - 1)
                choice.layers += layers
            choice.tokens += 1
            if generated.logprob is not None:
                choice.logprobs.append(generated)
                choice.offsets.append(len(choice.echo) + choice.detokenizer.decoded_length)
            if choice.last is None:
                self._metrics.first_token.observe(generated.at - choice.answer.times.submitted)
            else:
                self._metrics.between_tokens.observe(generated.at - choice.last)
            choice.last = generated.at
        text = choice.detokenizer.add([generated.token for generated in new], last=last.end is not None)
        if choice.detokenizer.stopped:
            choice.end = "stop"
            choice.answer.cancel()
        elif last.end is not None:
            choice.end = last.end
        if choice.end is not None:
            self._metrics.sequence.observe(last.at - choice.answer.times.submitted)
        calls: Sequence[dict[str, Any]] = ()
        if choice.parser is not None:
            text, calls = choice.parser.add(text, last=choice.end is not None)
            if choice.end == "stop" and choice.parser.calls:
                choice.end = "tool_calls"
        return Chunk(choice, text, last, layers, len(choice.logprobs) - 1, choice.end, calls)

    def cancel(self) -> None:
        """Cancel the sequences that haven't ended."""
        self._queue.close()
        for choice in self.choices:
            if choice.end is None:
                choice.answer.cancel()

    @property
    def planned(self) -> float | None:
        """The planned speedup, the smallest of all sequences; None if they are lossless, as it then depends on the
        acceptance rate of drafts.
        """
        return min((plan.planned for plan in self._plans if plan.planned is not None), default=None)

    @property
    def fallback_speedup(self) -> float | None:
        """The planned speedup, the smallest of all sequences, if the target can't be reached; None if it can."""
        return min((plan.fallback_speedup for plan in self._plans if plan.fallback_speedup is not None), default=None)

    @property
    def _plans(self) -> list[SpeedPlan]:
        return [choice.answer.plan for choice in self.choices if choice.answer.plan is not None]

    @property
    def new_tokens(self) -> int:
        """New tokens of all sequences so far."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def layers_per_token(self) -> float:
        """Mean number of layers per token, without the first tokens, which come from the prefill."""
        tokens = sum(max(0, choice.tokens - 1) for choice in self.choices)
        return sum(choice.layers for choice in self.choices) / tokens if tokens else 0.0


def _check_unicode(name: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{name}: the text is not valid Unicode, as it has half of a surrogate pair")
