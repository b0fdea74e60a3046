"""One request: its texts in the engine, and what comes of them, in the order in which it comes."""

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

from skipdecode.engine.engine import Engine, EngineClosed, EngineFull
from skipdecode.engine.sequence import Answer, Chosen
from skipdecode.errors import ConfigError
from skipdecode.families import longest_sequence
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.serve.detokenizer import Words
from skipdecode.serve.metrics import Metrics
from skipdecode.serve.protocol import Asked, ChatAsked, CompletionAsked, Failure
from skipdecode.serve.settings import ServeSettings


@dataclass
class Choice:
    """One text of a request.

    Attributes:
        index: among the request's.
        answer: of the engine.
        words: its text.
        tokens: of it so far.
        end: what ended it, as OpenAI says it.
        layers: that its tokens ran after the first one, which comes from the prompt's pass.
        last: when its last token came.
        logprobs: of its tokens, where they were asked for.
        offsets: characters that were decided before each of these tokens.
    """

    index: int
    answer: Answer
    words: Words
    tokens: int = 0
    end: str | None = None
    layers: int = 0
    last: float | None = None
    logprobs: list[Chosen] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What a text grew by.

    Attributes:
        choice: whose it is.
        text: maybe empty.
        chosen: the token, or the last of several.
        layers: that it ran.
        place: of the token in its text, from 0.
        end: what ended the text with it, as OpenAI says it; None where it goes on.
    """

    choice: Choice
    text: str
    chosen: Chosen
    layers: int
    place: int
    end: str | None


class Bell:
    """Wakes tasks of the running loop from other threads, once for many: each time is a write to a socket."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._to_wake: deque[asyncio.Event] = deque()
        self._rung = False

    def ring(self, event: asyncio.Event) -> None:
        """Have an event set, soon."""
        self._to_wake.append(event)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._rung = False  # who comes from now on rings anew
        while self._to_wake:
            self._to_wake.popleft().set()


class Inbox:
    """Tokens on their way from the engine's thread to a task of the loop, which is woken once for all that lie there.

    Args:
        bell: that wakes it.
        each: whether each token matters when it comes, and not only the last of a text.
        seconds: after which no more is waited for.
    """

    def __init__(self, bell: Bell, *, each: bool, seconds: float) -> None:
        self._bell = bell
        self._each = each
        self._lying: deque[tuple[int, Chosen]] = deque()
        self._woken = asyncio.Event()
        self._waking = False
        self._late = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._late = True
        self._woken.set()

    def close(self) -> None:
        """Wait no more."""
        self._timer.cancel()

    def put(self, index: int, chosen: Chosen) -> None:
        """Lay down a token of a text: the engine's thread."""
        self._lying.append((index, chosen))
        if not self._waking and (self._each or chosen.end is not None):
            self._waking = True
            self._bell.ring(self._woken)

    async def take(self) -> list[tuple[int, Chosen]]:
        """Wait for tokens, and take all there are. Raises TimeoutError where they come too late."""
        await self._woken.wait()
        if self._late:
            raise TimeoutError
        self._woken.clear()
        self._waking = False  # what is laid down from now on wakes anew
        return [self._lying.popleft() for _ in range(len(self._lying))]


class Job:
    """The texts of one request.

    Args:
        engine, tokenizer, settings, metrics, bell: of the server.
        asked: the request.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: ServeSettings,
        metrics: Metrics,
        bell: Bell,
        asked: Asked,
    ) -> None:
        self._engine, self._tokenizer, self._settings, self._metrics = engine, tokenizer, settings, metrics
        self.asked = asked
        self.speedup = settings.speedup if asked.speedup is None else asked.speedup
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        each = asked.stream or bool(asked.stop)
        self._inbox = Inbox(bell, each=each, seconds=settings.timeout)
        # Whether each token is looked at by itself, and not all together that have come.
        self._singly = bool(asked.stop) or asked.details or asked.top_logprobs_asked is not None

    async def start(self) -> None:
        """Hand all texts to the engine, or none. Raises ConfigError and Failure where that can't be."""
        try:
            self.asked.check()
            if self._engine.full:  # before anything is done for it
                raise EngineFull("as many requests wait as may")
            prompts = self._prompts()
            texts = len(prompts) * self.asked.n
            most = min(self._settings.most_texts, self._engine.most_waiting)  # more would be refused for ever
            if texts > most:
                raise ConfigError(
                    f"{len(prompts)} prompts with n = {self.asked.n} are {texts} texts: a request may have {most}"
                )
            self.prompt_tokens = sum(map(len, prompts))
            if texts > 1:  # others' tokens are to go out meanwhile
                await asyncio.to_thread(self._submit, prompts)
            else:
                self._submit(prompts)
        except EngineFull as error:
            self.cancel()
            raise Failure(429, f"the server is busy: {error}", "queue_full", headers={"Retry-After": "1"}) from error
        except EngineClosed as error:
            self.cancel()
            raise Failure(503, str(error), "shutting_down") from error
        except ConfigError as error:
            self.cancel()
            message = str(error).replace("max_new_tokens", self.asked.length_field)
            raise Failure(400, message, "invalid_value", self._field_of(message)) from error
        except BaseException:
            self.cancel()
            raise

    def _field_of(self, message: str) -> str | None:
        """The field of the request that a message names first."""
        named = re.findall(r"\w+", message)
        if isinstance(self.asked, ChatAsked):
            named = ["messages" if name == "prompt" else name for name in named]
        fields = type(self.asked).model_fields.keys() - {"model"}  # whose name has been checked
        return next((name for name in named if name in fields), None)

    def _prompts(self) -> list[list[int]]:
        if isinstance(self.asked, ChatAsked):
            return [self._chat(self.asked)]
        assert isinstance(self.asked, CompletionAsked)
        return [list(self._tokenised(p)) if isinstance(p, str) else p for p in self.asked.prompt]

    def _tokenised(self, prompt: str) -> Sequence[int]:
        _check_text("the prompt", prompt)
        tokens: Sequence[int] = self._tokenizer(prompt, verbose=False)["input_ids"]
        return tokens

    def _chat(self, asked: ChatAsked) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise Failure(
                400, "this checkpoint's tokenizer has no chat template: use /v1/completions", "no_chat_template"
            )
        try:
            messages = [message.plain() for message in asked.messages]
            text = json.dumps(messages, ensure_ascii=False)
        except (RecursionError, ValueError) as error:  # ValueError: pydantic's own limit
            raise Failure(400, "messages: they are nested too deeply", "invalid_value", "messages") from error
        _check_text("messages", text)
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs, and refuse messages by exceptions of jinja's
            raise Failure(400, f"the chat template refuses these messages: {error}", param="messages") from error
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _submit(self, prompts: Sequence[list[int]]) -> None:
        asked, settings = self.asked, self._settings
        new_tokens = asked.new_tokens or settings.new_tokens
        if new_tokens > settings.most_new_tokens:
            raise ConfigError(
                f"{asked.length_field} is {new_tokens}: this server gives {settings.most_new_tokens} at most"
            )
        for token in asked.logit_bias or ():
            if not 0 <= token < self._engine.vocabulary:
                last = self._engine.vocabulary - 1
                raise ConfigError(f"logit_bias names token {token}: the model knows those from 0 to {last}")
        sampling = asked.sampling
        positions = longest_sequence(self._engine.model.config)
        for prompt in prompts:
            if asked.new_tokens is None and positions is not None:  # a chat may go on until none is left
                new_tokens = max(1, min(settings.new_tokens, positions + 1 - len(prompt)))
            for n in range(asked.n):
                index = len(self.choices)
                seed = None
                if sampling["do_sample"]:
                    # Texts of one request differ, and the first is that of its seed.
                    seed = secrets.randbits(63) if asked.seed is None else asked.seed + n
                answer = self._engine.submit(
                    prompt,
                    # A draft at 1x is none: then as many layers draft as pay.
                    speedup=None if asked.lossless and self.speedup == 1 else self.speedup,
                    strict=settings.strict,
                    over=asked.over or (settings.over if asked.speedup is None and not asked.lossless else None),
                    seed=seed,
                    logprobs=asked.top_logprobs_asked,
                    listener=functools.partial(self._inbox.put, index),
                    lossless=asked.lossless,
                    max_new_tokens=new_tokens,
                    **sampling,
                )
                self.choices.append(Choice(index, answer, Words(self._tokenizer, asked.stop)))

    async def parts(self) -> AsyncIterator[list[Part]]:
        """What comes of the texts, all that has come by then at a time, until the last has ended.

        Raises Failure for one that fails, or takes too long.
        """
        try:
            while any(choice.end is None for choice in self.choices):
                try:
                    heard = await self._inbox.take()
                except TimeoutError as error:
                    seconds = self._settings.timeout
                    raise Failure(504, f"the request took more than {seconds:g} s", "timeout") from error
                come: dict[int, list[Chosen]] = {}
                for index, chosen in heard:
                    come.setdefault(index, []).append(chosen)
                yield [part for index, tokens in come.items() for part in self._parts(self.choices[index], tokens)]
        finally:
            self.cancel()

    def _parts(self, choice: Choice, tokens: list[Chosen]) -> Iterator[Part]:
        for new in [[token] for token in tokens] if self._singly else [tokens]:
            if choice.end is not None:
                return  # it was cancelled behind a stop, and a token more had been chosen
            last = new[-1]
            if last.error is not None:
                raise Failure(500, "the text could not be decoded", "failed") from last.error
            if last.end == "cancelled":
                raise Failure(503, "the server is shutting down", "shutting_down")
            yield self._part(choice, new)

    def _part(self, choice: Choice, new: Sequence[Chosen]) -> Part:
        schedule, last = choice.answer.schedule, new[-1]
        layers = schedule.prompt_budget
        for chosen in new:
            if choice.tokens:
                layers = schedule.budget(choice.tokens - 1)
                choice.layers += layers
            choice.tokens += 1
            if chosen.logprob is not None:
                choice.logprobs.append(chosen)
                choice.offsets.append(choice.words.decided)
            self._metrics_of(choice, chosen)
        text = choice.words.add([chosen.token for chosen in new], last=last.end is not None)
        if choice.words.stopped:
            choice.end = "stop"
            choice.answer.cancel()
        elif last.end is not None:
            choice.end = last.end
        if choice.end is not None:
            self._metrics.whole.observe(last.at - choice.answer.times.submitted)
        return Part(choice, text, last, layers, choice.tokens - 1, choice.end)

    def _metrics_of(self, choice: Choice, chosen: Chosen) -> None:
        if choice.last is None:
            self._metrics.first_token.observe(chosen.at - choice.answer.times.submitted)
        else:
            self._metrics.between_tokens.observe(chosen.at - choice.last)
        choice.last = chosen.at

    def cancel(self) -> None:
        """End every text that hasn't ended, and free its row."""
        self._inbox.close()
        for choice in self.choices:
            if choice.end is None:
                choice.answer.cancel()

    @property
    def planned(self) -> float | None:
        """The speedup that is expected: of several texts the smallest; None of lossless ones, which it depends on how
        well drafts do.
        """
        return min((plan.planned for plan in self._plans if plan.planned is not None), default=None)

    @property
    def shortfall(self) -> float | None:
        """What is planned where the speedup can't be reached, likewise; None where it is reached."""
        return min((plan.shortfall for plan in self._plans if plan.shortfall is not None), default=None)

    @property
    def _plans(self) -> list[SpeedPlan]:
        return [choice.answer.plan for choice in self.choices if choice.answer.plan is not None]

    @property
    def new_tokens(self) -> int:
        """Of all texts so far."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def layers_per_token(self) -> float:
        """Over the tokens after each text's first."""
        tokens = sum(max(0, choice.tokens - 1) for choice in self.choices)
        return sum(choice.layers for choice in self.choices) / tokens if tokens else 0.0


def _check_text(name: str, text: str) -> None:
    if any("\ud800" <= mark <= "\udfff" for mark in text):
        raise ConfigError(f"{name}: no text in UTF-8, for a half of a surrogate pair")
