"""An engine: texts are admitted while others are decoded, each with its own speed, settings and seed.

A step runs one token of every text. Texts are ordered deepest budget first, so each layer runs on a prefix of them
(law 7), whatever their positions; the weights of a layer are read once for all texts that run it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from skipdecode.engine.kv_pool import Arena, ArenaCache, Span
from skipdecode.engine.ragged_inputs import RaggedInputs, TextPositions, nested_groups, prefix_lengths
from skipdecode.engine.sequence import Answer, Chosen, Input, Preparer, Text
from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import longest_sequence, unwrap
from skipdecode.generate.decode_loop import GenerativeModel
from skipdecode.generate.fast_path import fast_path, free_memory
from skipdecode.generate.skip_generate import choose_draft, resolve_plan
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over, SkipSchedule

MEMORY_SHARE = 0.25  # of the memory that is free, for keys and values where nobody says how much
MOST_DRAFTING = 4  # texts that decode where lossless ones draft: drafts are arithmetic, which more of them wait for
MOST_LOGPROBS = 100  # tokens that are given with each
LONGEST = 4096  # columns of a text that memory is kept for, of a model without a table of positions


class EngineFull(Exception):
    """As many requests wait as may: submit it again later."""


class EngineClosed(Exception):
    """The engine has ended, or drains, and takes no requests any more."""


@dataclass(frozen=True)
class EngineState:
    """An engine at a moment, and what it has done since its start.

    Attributes:
        waiting, running: requests.
        free_columns, columns: of all layers' keys and values.
        steps: decode steps.
        tokens: that were chosen, those of prompts' passes among them.
        rows: tokens that decode steps ran; over `steps` the mean batch.
        layers: that these ran together; over `rows` the layers a token.
        prompt_tokens: that were run.
        requests: that have ended, cancelled ones among them.
    """

    waiting: int
    running: int
    free_columns: int
    columns: int
    steps: int
    tokens: int
    rows: int
    layers: int
    prompt_tokens: int
    requests: int


class _Row:
    """A text that decodes, and the columns that it holds."""

    def __init__(self, text: Text, spans: list[Span | None], slot: int) -> None:
        self.text = text
        self.spans = spans
        self.slot = slot
        # (steps after which it is free, its columns), the last first
        self.held = sorted(
            ((cutoff, span) for cutoff, span in zip(text.cutoffs, spans, strict=True) if span is not None), reverse=True
        )


class Engine:
    """Decodes requests side by side with one model.

    `with Engine(model, tokenizer) as engine:` starts a thread that decodes what `submit` is given, until the block
    ends. Without it, `step` decodes one token of each text.

    A text is that of `skip_generate` for its prompt alone (law 5). With the compiled kernels its logits are the same
    bit for bit, but for bfloat16; elsewhere they differ in their last digits, so that a token may where the best two
    lie that close. A sampled text with a seed is that of `skip_generate` behind `torch.manual_seed(seed)`.

    Args:
        model: a causal language model in evaluation mode that the fast path supports (`skipdecode.fastpath.model`). It
            must not be changed while the engine has it.
        tokenizer: for `stop_strings`.
        most_rows: texts that decode at once.
        most_waiting: requests that wait at most.
        cache_bytes: of keys and values; by default enough for `most_rows` of the longest texts at full depth, and a
            quarter of the free memory at most.
        wave_rows: while texts decode, others are admitted when so many wait. Texts of one age run few layers together
            in their later steps, as the weights of a layer are read for the deepest text.
        wave_seconds: or when the first has waited so long.
        wave_tokens: of prompts that run between two steps, at most, unless a single one has more.
        weights: as in `skip_generate`.

    Raises:
        ConfigError: for a model that the fast path doesn't support, with the reason, and for numbers out of range.
    """

    @torch.inference_mode(mode=False)  # its thread is outside of the caller's
    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Any = None,
        *,
        most_rows: int = 32,
        most_waiting: int = 256,
        cache_bytes: int | None = None,
        wave_rows: int = 1,
        wave_seconds: float = 0.05,
        wave_tokens: int = 512,
        weights: Weights | None = None,
    ) -> None:
        check_counts(most_rows=most_rows, most_waiting=most_waiting, wave_rows=wave_rows, wave_tokens=wave_tokens)
        if not 0 <= wave_seconds < math.inf:
            raise ConfigError(f"wave_seconds is {wave_seconds!r}: it must be a number of seconds, 0 or more")
        inner = unwrap(model)
        fast = fast_path(inner)
        reason = fast.why_not()
        if reason is not None:
            raise ConfigError(f"an engine can't decode with this model: {reason}")
        self.model, self.tokenizer, self.weights = model, tokenizer, weights
        self._decoder = fast.decoder(weights, looked=True)
        self._prepare = Preparer(model, tokenizer)
        self._depth = len(self._decoder.layers)
        positions = longest_sequence(inner.config)
        self._longest = positions or LONGEST
        self._cache = ArenaCache(self._arena(cache_bytes, most_rows), self._depth)
        self._positions = TextPositions(self._decoder, self.model.device)
        self._starts = torch.zeros(most_rows, self._depth, dtype=torch.int32)
        self._slots = list(reversed(range(most_rows)))  # free ones
        self.most_waiting = most_waiting
        self._wave = (min(wave_rows, most_rows), wave_seconds, wave_tokens)
        self._waiting: deque[Text] = deque()
        self._rows: list[_Row] = []
        self._counts = dict.fromkeys(("steps", "tokens", "rows", "layers", "prompt_tokens", "requests"), 0)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._draining = False

    def _arena(self, cache_bytes: int | None, most_rows: int) -> Arena:
        block = self._decoder.layers[0]
        size = 2 * block.kv_heads * block.head_dim * torch.empty(0, dtype=self._decoder.dtype).element_size()
        device = self.model.device
        if cache_bytes is None:
            free = free_memory() if device.type != "cuda" else torch.cuda.mem_get_info(device)[0]
            cache_bytes = int(min(MEMORY_SHARE * free, most_rows * self._longest * self._depth * size))
        columns = cache_bytes // size
        if columns < 2 * self._depth:
            raise ConfigError(
                f"cache_bytes is {cache_bytes}: a column of this model's keys and values takes {size} bytes a layer, "
                f"and a text of two tokens {2 * self._depth} of them"
            )
        columns = min(columns, 2**31 - 1)  # the kernels count them so
        return Arena(columns, block.kv_heads, block.head_dim, self._decoder.dtype, device)

    # ---- requests

    @torch.inference_mode(mode=False)
    def submit(
        self,
        prompt: Sequence[int],
        *,
        schedule: SkipSchedule | Mapping[str, Any] | None = None,
        speedup: float | None = None,
        over: Over | None = None,
        strict: bool = False,
        lossless: bool = False,
        seed: int | None = None,
        logprobs: int | None = None,
        listener: Callable[[Chosen], None] | None = None,
        **settings: Any,
    ) -> Answer:
        """Hand in a request; any thread may.

        Args:
            prompt: token ids.
            schedule: as in `skip_generate`.
            speedup: likewise; it is solved for the prompt alone.
            over: likewise.
            strict: likewise; `Answer.plan` says what a speedup is decoded with.
            lossless: give full depth's own text, also when sampling with a seed. Where few texts decode, schedule or
                speedup draft tokens, by default as many layers as pay, and full depth verifies several at a time.
            seed: of sampling. Without one, samples are drawn from torch's own generator.
            logprobs: how many of the likeliest tokens to give with each token.
            listener: as of `Answer`.
            settings: generate's own, such as `max_new_tokens`, `do_sample`, `temperature`, `stop_strings`.

        Raises:
            ConfigError: for what `skip_generate` refuses, and for a text that can never fit; nothing is decoded then.
            EngineFull: where as many wait as may.
            EngineClosed: after `drain`, `close` or a fault of the engine's own.
        """
        most = min(MOST_LOGPROBS, self.vocabulary)
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= most):
            raise ConfigError(f"logprobs is {logprobs!r}: it must be a number of tokens from 0 to {most}")
        if lossless not in (True, False):
            raise ConfigError(f"lossless is {lossless!r}: it must be True or False")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64):
            raise ConfigError(f"seed is {seed!r}: it must be an integer of 64 bits")
        self._check_open()
        self._check_room()  # here too: what is refused should cost little
        prepared = self._prepare(prompt, settings)
        if lossless and schedule is None and speedup is None:
            if over is not None:
                raise ConfigError(f"over is {over!r} without a speedup: it says what the speedup is of")
            plan, drafts = None, choose_draft(self.model, [len(prompt)], weights=self.weights)
        else:
            how: Any = {"over": over, "strict": strict, "weights": self.weights, "prompts": [len(prompt)]}
            plan = resolve_plan(self.model, schedule, speedup, lossless=lossless, **how)
            drafts = plan.schedule
        found = SkipSchedule.full_depth(self._depth) if lossless else drafts
        answer = Answer(len(prompt), found, None if lossless else plan, listener)
        text = Text(prepared, answer, seed, logprobs, drafts if lossless else None)
        needed = sum(_columns(text))
        if needed > self._cache.arena.columns:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens with up to {prepared.new_tokens} new ones needs {needed} columns of "
                f"keys and values over all layers, and the engine has {self._cache.arena.columns}: shorten it, lower "
                "max_new_tokens, or give the engine more cache_bytes"
            )
        with self._changed:
            self._check_open()
            self._check_room()
            self._waiting.append(text)
            self._changed.notify_all()
        return answer

    def _check_open(self) -> None:
        if self._closing or self._draining:
            raise EngineClosed("the engine is closed: it takes no requests any more")

    def _check_room(self) -> None:
        if self.full:
            raise EngineFull(f"{len(self._waiting)} requests wait already")

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows: those below."""
        return self._prepare.vocabulary

    @property
    def full(self) -> bool:
        """Whether as many requests wait as may."""
        return len(self._waiting) >= self.most_waiting

    @property
    def state(self) -> EngineState:
        """What there is at the moment."""
        arena = self._cache.arena
        return EngineState(len(self._waiting), len(self._rows), arena.free, arena.columns, **self._counts)

    @property
    def alive(self) -> bool:
        """Whether its thread runs and takes requests."""
        return self._thread is not None and self._thread.is_alive() and not (self._closing or self._draining)

    @property
    def gaps(self) -> int:
        """Pieces that the free memory of keys and values is in; 1 where nobody holds any."""
        return self._cache.arena.gaps

    # ---- the thread

    def __enter__(self) -> "Engine":
        self._thread = threading.Thread(target=self._run, name="skipdecode-engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for the end of all, so many seconds at most.

        Returns whether it came: False where the time is over, or where the engine is closed or fails meanwhile, which
        ends texts where they are.
        """
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            if self._thread is not None:
                self._changed.wait_for(lambda: self._closing or not (self._waiting or self._rows), timeout)
                return not (self._closing or self._waiting or self._rows)
        while self.step():
            pass
        return True

    def close(self) -> None:
        """End every text where it is, and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for text in [*self._waiting, *(row.text for row in self._rows)]:
            text.answer.cancel()
        self._waive()
        self._leave()

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self.step():
                    with self._changed:
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: self._waiting or self._closing, 0.1)
        except BaseException as error:  # a fault of the engine's own: nobody is to wait for it
            with self._changed:
                self._closing = True
                waiting = list(self._waiting)
                self._waiting.clear()
                self._changed.notify_all()
            self._fail(list(self._rows), error)
            for text in waiting:
                text.answer.add(Chosen(-1, end="failed", error=error))
            raise

    # ---- steps

    @torch.no_grad()
    def step(self) -> bool:
        """Admit what may be, and decode one token of every text. Returns whether there was any."""
        self._waive()
        self._leave()
        self._admit()
        if not self._rows:
            return False
        drafting = len(self._rows) <= MOST_DRAFTING
        going = [(row, each) for row in self._rows for each in row.text.inputs(drafting=drafting)]
        for group in nested_groups([each.layers for _, each in going]):
            try:
                self._decode([going[n] for n in group])
            except Exception as error:  # none of them can go on, and others must
                self._fail([going[n][0] for n in group], error)
        self._counts["steps"] += 1
        return True

    def _waive(self) -> None:
        """Let requests go that were cancelled while they waited."""
        with self._changed:  # others submit meanwhile
            gone = [text for text in self._waiting if text.answer.cancelled]
            if gone:
                self._waiting = deque(text for text in self._waiting if text not in gone)
        for text in gone:
            text.answer.add(Chosen(-1, end="cancelled"))
            self._counts["requests"] += 1

    def _leave(self) -> None:
        """Let texts go that were cancelled."""
        for row in [row for row in self._rows if row.text.answer.cancelled]:
            self._drop(row)
            row.text.answer.add(Chosen(-1, end="cancelled"))

    def _drop(self, row: _Row) -> None:
        """Free what a text holds."""
        self._rows.remove(row)
        for _, span in row.held:
            self._cache.arena.give(span)
        row.held.clear()
        self._slots.append(row.slot)
        self._counts["requests"] += 1

    def _fail(self, rows: Sequence[_Row], error: BaseException) -> None:
        for row in [row for row in rows if row in self._rows]:
            self._drop(row)
            row.text.answer.add(Chosen(-1, end="failed", error=error))

    def _admit(self) -> None:
        """Admit a wave of the requests that wait, in their order, as far as there is room."""
        least, patience, tokens = self._wave
        waiting = len(self._waiting)
        if not waiting or not self._slots:
            return
        waited = time.monotonic() - self._waiting[0].answer.times.submitted
        if self._rows and min(waiting, len(self._slots)) < least and waited < patience:
            return
        while self._waiting and self._slots and tokens > 0:
            text = self._waiting[0]
            counts = _columns(text)
            taken = self._cache.arena.take([count for count in counts if count])
            if taken is None:
                return
            with self._changed:
                self._waiting.popleft()
            spans = iter(taken)
            row = _Row(text, [next(spans) if count else None for count in counts], self._slots.pop())
            self._rows.append(row)
            tokens -= text.prompt.shape[1]
            try:
                self._prefill(row)
            except Exception as error:
                self._fail([row], error)

    def _prefill(self, row: _Row) -> None:
        """Run a prompt, by what runs it in `skip_generate`, and choose its text's first token."""
        text = row.text
        text.answer.times.admitted = time.monotonic()
        for layer, span in enumerate(row.spans):
            self._starts[row.slot, layer] = span.start if span is not None else 0
        cache = self._cache.arena.cache_of(text.schedule, text.steps, row.spans)
        layers, stop = text.schedule.prompt_layers, text.schedule.prompt_stop
        logits = self._decoder.prefill(text.prompt, layers, cache, torch.ones_like(text.prompt), stop=stop)
        self._counts["prompt_tokens"] += text.prompt.shape[1]
        self._extend([row], logits)

    def _decode(self, going: Sequence[tuple[_Row, Input]]) -> None:
        """Run tokens of texts whose sets of layers nest, the largest first, and choose what follows."""
        layer_sets = [each.layers for _, each in going]
        layers, columns = layer_sets[0], [each.column for _, each in going]
        slots = [row.slot for row, _ in going]
        self._positions.reach(max(columns) + 1)
        inputs = RaggedInputs(
            self._cache.arena,
            self._starts[slots],
            columns,
            slots,
            layers,
            prefix_lengths(layer_sets),
            *self._positions.of(columns),
        )
        tokens = torch.tensor([each.token for _, each in going], device=self.model.device)
        logits = self._decoder(tokens, layers, self._cache, inputs)  # type: ignore[arg-type]
        self._counts["rows"] += len(going)
        self._counts["layers"] += sum(map(len, layer_sets))
        self._extend([row for row, _ in going], logits)

    def _extend(self, rows: Sequence[_Row], logits: torch.Tensor) -> None:
        """Have texts go on by logits [tokens that were run, vocabulary], those of a text side by side.

        Frees what isn't read any more.
        """
        logits = logits.float()
        greedy = logits.argmax(dim=-1).tolist()
        end = 0
        for row, same in groupby(rows):
            start, end = end, end + len(list(same))
            before = row.text.columns
            try:
                ended = row.text.take(greedy[start:end], logits[start:end])
            except Exception as error:  # of a processor or a criterion of this text's
                self._fail([row], error)
                continue
            self._counts["tokens"] += row.text.columns - before
            if ended:
                self._drop(row)
                continue
            while row.held and row.held[-1][0] <= row.text.step:  # no later token runs the layer
                self._cache.arena.give(row.held.pop()[1])


def _columns(text: Text) -> list[int]:
    """The columns that a text needs of each layer: its prompt's and those of tokens that run it, or none (law 6)."""
    prompt = text.prompt.shape[1]
    return [prompt + count if count else 0 for count in text.cutoffs]
