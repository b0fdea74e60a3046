"""An engine for continuous batching: requests are admitted while others decode.

Each request has its own target speedup, settings and seed. A step runs the next part of the prompts, and one token of
every sequence. These tokens are ordered by the number of layers that they run, deepest first, so each layer runs on a
prefix of the batch (invariant 7, docs/how-it-works.md), and the weights of a layer are read once for all that run it.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from skipdecode.engine.kv_pool import KVPool
from skipdecode.engine.model_runner import ModelRunner
from skipdecode.engine.prefix_cache import PrefixCache
from skipdecode.engine.prepare import Preparer
from skipdecode.engine.scheduler import PromptChunk, RunningSequence, Scheduler
from skipdecode.engine.sequence import Answer, EngineSequence, GeneratedToken, TokenInput
from skipdecode.engine.state import EngineState
from skipdecode.errors import ConfigError, check_counts
from skipdecode.families import longest_sequence, unwrap
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.request import GenerativeModel
from skipdecode.generate.skip_generate import choose_draft, resolve_plan
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import Over, SkipSchedule

MAX_LOGPROBS = 100  # likeliest tokens that are reported with each token
MIN_WAVE_TOKENS = 8
DEFAULT_POSITIONS = 4096  # length of a sequence that memory is planned for, if the model's config names no maximum


class EngineFull(Exception):
    """The maximum number of requests is waiting: submit the request again later."""


class EngineClosed(Exception):
    """The engine is draining or has ended, and accepts no more requests."""


class Engine:
    """Decodes many requests together with one model.

    `with Engine(model, tokenizer) as engine:` starts a thread that decodes what is given to `submit`, until the block
    ends. Without the block, call `step` to decode one token of each sequence.

    The tokens of a request are those of `skip_generate` for its prompt alone (invariant 5, docs/how-it-works.md). With
    the compiled kernels the logits are identical for prompts of up to 512 tokens (longer ones `skip_generate` runs by
    torch's operators), except in bfloat16. Otherwise they differ by rounding, so a token may differ if the two
    likeliest tokens are that close. A sampled request with a seed gives the tokens of `skip_generate` after
    `torch.manual_seed(seed)`.

    Args:
        model: a causal language model in evaluation mode that the fast path supports (`skipdecode.fastpath.model`). It
            must not change while the engine uses it.
        tokenizer: for `stop_strings`.
        most_rows: maximum number of sequences that decode together.
        most_waiting: maximum number of requests that wait.
        cache_bytes: memory for keys and values; by default enough for `most_rows` sequences of maximum length at full
            depth, but at most a quarter of the free memory.
        wave_rows: while sequences decode, waiting ones are admitted once there are this many. Sequences that are
            admitted together reach their later, cheaper steps together, whereas each step of a mixed batch reads the
            weights of all layers that its deepest sequence runs.
        wave_seconds: or once the first of them has waited this long.
        wave_tokens: maximum number of prompt tokens that run between two steps; longer prompts run in chunks.
        prefix_mib: memory in MiB for keys and values of earlier prompts, which are used again for prompts that begin
            alike; 0 for none.
        weights: as in `skip_generate`.

    Raises:
        ConfigError: for a model that the fast path doesn't support, with the reason, and for numbers out of range.
    """

    @torch.inference_mode(mode=False)  # the engine's thread doesn't inherit the mode of its creator
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
        wave_tokens: int = 256,
        prefix_mib: float = 512,
        weights: Weights | None = None,
    ) -> None:
        check_counts(most_rows=most_rows, most_waiting=most_waiting, wave_rows=wave_rows, wave_tokens=wave_tokens)
        if not 0 <= wave_seconds < math.inf:
            raise ConfigError(f"wave_seconds is {wave_seconds!r}: it must be a number of seconds, 0 or more")
        if wave_tokens < MIN_WAVE_TOKENS:
            raise ConfigError(f"wave_tokens is {wave_tokens}: it must be at least {MIN_WAVE_TOKENS}")
        if not 0 <= prefix_mib < math.inf:
            raise ConfigError(f"prefix_mib is {prefix_mib!r}: it must be a number of MiB, 0 or more")
        inner = unwrap(model)
        fast = fast_path(inner)
        reason = fast.why_not()
        if reason is not None:
            raise ConfigError(f"an engine can't decode with this model: {reason}")
        self.model, self.tokenizer, self.weights = model, tokenizer, weights
        self.most_waiting = most_waiting
        self._prepare = Preparer(model, tokenizer)
        decoder = fast.decoder(weights, looked=True)
        self._depth = len(decoder.layers)
        max_length = longest_sequence(inner.config) or DEFAULT_POSITIONS
        self._pool = KVPool.for_decoder(decoder, self.model.device, most_rows * max_length, cache_bytes)
        self._prefixes = PrefixCache(int(prefix_mib * 2**20))
        self._counts = dict.fromkeys(("tokens", "prompt_tokens", "steps", "step_tokens", "step_layers"), 0)
        self._changed = threading.Condition()
        waves = (wave_rows, wave_seconds, wave_tokens)
        self._scheduler = Scheduler(self._pool, self._prefixes, self._changed, most_rows, self._depth, *waves)
        self._runner = ModelRunner(decoder, self._pool, self._scheduler.starts)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._draining = False

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
        listener: Callable[[GeneratedToken], None] | None = None,
        **settings: Any,
    ) -> Answer:
        """Submit a request. Any thread may call it.

        Args:
            prompt: token ids.
            schedule: as in `skip_generate`.
            speedup: as in `skip_generate`; the schedule is solved for the length of this prompt.
            over: as in `skip_generate`.
            strict: as in `skip_generate`; `Answer.plan` says how a speedup is decoded.
            lossless: give identical output to full depth, by self-speculative decoding; also for sampling with a seed.
                While few sequences decode, tokens are drafted at `schedule` or `speedup`, by default at the best draft
                depth, and full depth verifies several at a time.
            seed: for sampling; by default samples are drawn from torch's global generator.
            logprobs: how many of the likeliest tokens to report with each token.
            listener: as in `Answer`.
            settings: of generate, such as `max_new_tokens`, `do_sample`, `temperature`, `stop_strings`.

        Raises:
            ConfigError: for what `skip_generate` refuses, and for a request that can never fit into the cache; nothing
                is decoded then.
            EngineFull: if the maximum number of requests is waiting.
            EngineClosed: after `drain`, `close`, or an internal failure of the engine.
        """
        max_logprobs = min(MAX_LOGPROBS, self.vocabulary)
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= max_logprobs):
            raise ConfigError(f"logprobs is {logprobs!r}: it must be a number of tokens from 0 to {max_logprobs}")
        if lossless not in (True, False):
            raise ConfigError(f"lossless is {lossless!r}: it must be True or False")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64):
            raise ConfigError(f"seed is {seed!r}: it must be an integer of 64 bits")
        self._check_accepts()  # a request that is refused should cost little
        prepared = self._prepare(prompt, settings)
        plan = None
        if lossless and schedule is None and speedup is None:
            if over is not None:
                raise ConfigError(f"over is {over!r} without a speedup: it says which time the speedup refers to")
            solved = choose_draft(self.model, [len(prompt)], weights=self.weights)
        else:
            how: Any = {"over": over, "strict": strict, "weights": self.weights, "prompts": [len(prompt)]}
            plan = resolve_plan(self.model, schedule, speedup, lossless=lossless, **how)
            solved = plan.schedule
        if lossless:
            answer = Answer(len(prompt), SkipSchedule.full_depth(self._depth), None, listener)
        else:
            answer = Answer(len(prompt), solved, plan, listener)
        sequence = EngineSequence(prepared, answer, seed, logprobs, solved if lossless else None)
        needed = sum(sequence.slots)
        if needed > self._pool.slots:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens with up to {prepared.new_tokens} new tokens needs {needed} KV slots "
                f"over all layers, and the engine has {self._pool.slots}: shorten the prompt, lower max_new_tokens, or "
                "give the engine more cache_bytes"
            )
        with self._changed:
            self._check_accepts()
            self._scheduler.waiting.append(sequence)
            self._changed.notify_all()
        return answer

    def _check_accepts(self) -> None:
        """Raise EngineClosed or EngineFull if no request is accepted at the moment."""
        if self._closing or self._draining:
            raise EngineClosed("the engine is closed: it accepts no more requests")
        if self.full:
            raise EngineFull(f"{len(self._scheduler.waiting)} requests are waiting, the maximum")

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return self._prepare.vocabulary

    @property
    def full(self) -> bool:
        """Whether the maximum number of requests is waiting."""
        return len(self._scheduler.waiting) >= self.most_waiting

    @property
    def state(self) -> EngineState:
        """The state at the moment."""
        scheduler, pool = self._scheduler, self._pool
        return EngineState(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            slots=pool.slots,
            free_slots=pool.free_slots,
            free_regions=pool.free_regions,
            requests=scheduler.ended,
            prefix_tokens=scheduler.prefix_tokens,
            prefix_bytes=self._prefixes.nbytes,
            **self._counts,
        )

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and accepts requests."""
        return self._thread is not None and self._thread.is_alive() and not (self._closing or self._draining)

    def __enter__(self) -> "Engine":
        self._thread = threading.Thread(target=self._run_thread, name="skipdecode-engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Accept no more requests, and wait for all of them to end.

        Args:
            timeout: maximum seconds to wait; by default there is no limit.

        Returns:
            Whether all requests ended by themselves; False after the timeout, and if the engine is closed or fails in
            the meantime.
        """
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            if self._thread is not None:
                self._changed.wait_for(lambda: self._closing or not self._has_requests, timeout)
                return not (self._closing or self._has_requests)
        while self.step():
            pass
        return True

    @property
    def _has_requests(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for sequence in [*self._scheduler.waiting, *(running.sequence for running in self._scheduler.running)]:
            sequence.answer.cancel()
        self._scheduler.remove_cancelled()
        self._prefixes.clear()

    def _run_thread(self) -> None:
        try:
            while not self._closing:
                if not self.step():
                    with self._changed:
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: self._scheduler.waiting or self._closing, 0.1)
        except BaseException as error:  # an internal failure: nobody may wait for this thread for ever
            with self._changed:
                self._closing = True
                waiting = list(self._scheduler.waiting)
                self._scheduler.waiting.clear()
                self._changed.notify_all()
            self._fail(list(self._scheduler.running), error)
            for sequence in waiting:
                sequence.answer.add(GeneratedToken(-1, end="failed", error=error))
            raise

    @torch.no_grad()
    def step(self) -> bool:
        """Run the next part of the prompts, and decode one token of every sequence. Returns whether anything ran."""
        self._scheduler.remove_cancelled()
        prompts = self._scheduler.schedule_prompts()
        for chunks in prompts:
            try:
                self._prefill(chunks)
            except Exception as error:  # the sequences of other groups go on
                self._fail([chunk.running for chunk in chunks], error)
        groups = self._scheduler.schedule()
        for group in groups:
            sequences = [running for running, _ in group]
            try:
                self._postprocess(sequences, self._decode(group))
            except Exception as error:
                self._fail(sequences, error)
        self._counts["steps"] += bool(groups)
        return bool(prompts or groups)

    def _prefill(self, chunks: Sequence[PromptChunk]) -> None:
        """Run chunks of prompts that run the same layers, and choose the first tokens of prompts that end with one."""
        logits = self._runner.prefill(chunks)
        for chunk in chunks:
            self._counts["prompt_tokens"] += chunk.computed - chunk.start
            self._scheduler.finish(chunk)
        ended = [n for n, chunk in enumerate(chunks) if chunk.is_last]
        if ended:
            self._postprocess([chunks[n].running for n in ended], logits[ended])

    def _decode(self, group: Sequence[tuple[RunningSequence, TokenInput]]) -> torch.Tensor:
        """Run tokens whose sets of layers are nested, largest set first. Returns logits [tokens, vocabulary]."""
        logits = self._runner.decode(group)
        self._counts["step_tokens"] += len(group)
        self._counts["step_layers"] += sum(len(token.layers) for _, token in group)
        return logits

    def _postprocess(self, sequences: Sequence[RunningSequence], logits: torch.Tensor) -> None:
        """Advance sequences, and free the memory that they don't need any more.

        `sequences` has the sequence of each row of the logits [tokens, vocabulary]; those of one sequence are adjacent.
        """
        logits = logits.float()
        greedy = logits.argmax(dim=-1).tolist()
        end = 0
        for running, tokens in groupby(sequences):
            start, end = end, end + len(list(tokens))
            length = running.sequence.length
            try:
                ended = running.sequence.advance(greedy[start:end], logits[start:end])
            except Exception as error:  # of this sequence's own processor, criterion or listener
                self._fail([running], error)
                continue
            self._counts["tokens"] += running.sequence.length - length
            if ended:
                self._scheduler.remove(running)
            else:
                self._scheduler.free_unused(running)

    def _fail(self, sequences: Sequence[RunningSequence], error: BaseException) -> None:
        for running in [running for running in sequences if running in self._scheduler.running]:
            self._scheduler.remove(running)
            running.sequence.answer.add(GeneratedToken(-1, end="failed", error=error))
