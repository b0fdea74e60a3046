"""An engine decodes each request as if it were alone, whatever else is in the batch, and frees all memory."""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_cases import FAMILIES, SCHEDULES, alone, play
from fastpath_cases import fresh, tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCABULARY
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from skipdecode import ConfigError, Engine, SkipSchedule, skip_generate
from skipdecode.engine.engine import EngineClosed, EngineFull
from skipdecode.engine.kv_pool import KVPool, Span
from skipdecode.engine.model_runner import ModelRunner
from skipdecode.engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from skipdecode.engine.ragged_inputs import nested_groups, prefix_lengths
from skipdecode.engine.sequence import Answer

PROMPT = [5, 9, 30, 7]
LONG = [4 + n * n % 57 for n in range(85)]
FULL = SkipSchedule.full_depth(6)


def decode_all(engine: Engine) -> None:
    """Decode all requests; unlike `drain`, more can be submitted afterwards."""
    while engine.step():
        pass


@pytest.mark.parametrize("name", FAMILIES)
def test_batched_requests_give_the_tokens_of_their_prompts_alone(name: str) -> None:
    assert play(name, torch.float64, 60, seed=1) > 0


@pytest.mark.parametrize("name", ["opt", "qwen3", "bloom", "mistral", "opt-350m"])
def test_batched_requests_give_the_tokens_of_their_prompts_alone_with_compiled_kernels(name: str) -> None:
    assert play(name, torch.float32, 40, seed=2) > 0


def test_requests_admitted_in_waves_give_the_tokens_of_their_prompts_alone() -> None:
    assert play("opt", torch.float64, 40, seed=3, wave_rows=3, wave_seconds=60.0) > 0


def test_requests_submitted_by_several_threads_give_the_tokens_of_their_prompts_alone() -> None:
    model: Any = tiny("llama")
    found: dict[int, tuple[int, ...]] = {}
    with Engine(model, most_rows=4) as engine:

        def request(number: int) -> None:
            prompt = [4 + number] * (1 + number % 5)
            answer = engine.submit(prompt, schedule=SCHEDULES[number % 3], max_new_tokens=8, do_sample=False)
            tokens = [generated.token for generated in answer]
            assert tuple(tokens) == answer.result(10).tokens
            found[number] = tuple(tokens)

        threads = [threading.Thread(target=request, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.drain(10)
    for number, tokens in found.items():
        ids = torch.tensor([[4 + number] * (1 + number % 5)])
        how: Any = {"schedule": SCHEDULES[number % 3], "max_new_tokens": 8, "do_sample": False}
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=skip_generate, **how)
        assert alone[0, ids.shape[1] :].tolist() == list(tokens)
    assert len(found) == 20


def test_requests_are_decoded_correctly_under_frequent_thread_switches() -> None:
    how: Any = {"schedule": SCHEDULES[1], "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Engine(tiny("opt"), most_rows=3, most_waiting=2000) as engine:

            def request(number: int) -> list[Answer]:
                return [engine.submit([4 + number] * 3, **how) for _ in range(120)]

            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(request, range(4)))
            found[0][-1].cancel()
            assert engine.drain(60)
            tokens = [{answer.result(0).tokens for answer in answers} for answers in found]
    finally:
        sys.setswitchinterval(interval)
    assert [len(distinct) for distinct in tokens[1:]] == [1, 1, 1]


def test_lossless_requests_draft_only_while_few_sequences_decode() -> None:
    how: Any = {"lossless": True, "max_new_tokens": 18, "do_sample": False, "eos_token_id": None}
    for schedule, count in ((FULL, 1), (SCHEDULES[1], 5)):
        engine = Engine(tiny("opt"))
        answers = [engine.submit(PROMPT, schedule=schedule, **how) for _ in range(count)]
        assert engine.drain()
        assert {answer.result(0).tokens for answer in answers} == {tuple(alone(engine.model, PROMPT, how))}
        decoded = engine.state.tokens - count
        drafts = engine.state.step_tokens - decoded
        assert (drafts > 0) == (count == 1)
        assert drafts <= decoded, "drafts by all layers are all accepted, so each costs one more token"


def test_prepared_settings_are_reused_only_for_requests_with_the_same_settings() -> None:
    model: Any = fresh("opt")
    engine = Engine(model)
    prompts = [PROMPT, [7, 7, 7, 7], [9, 8]]
    requests: list[dict[str, Any]] = [
        {"max_new_tokens": 5, "do_sample": False},
        {"max_new_tokens": 7, "do_sample": False},
        {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 11},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 1.7, "seed": 3},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 0.6, "seed": 3},
        {"max_new_tokens": 5, "do_sample": False, "repetition_penalty": 5.0},
        {"max_new_tokens": 5, "do_sample": False, "sequence_bias": {(40,): 9.0}},
    ]
    for default in (None, 40):  # a changed default applies to later requests
        model.generation_config.eos_token_id = default
        for _ in range(2):
            for prompt in prompts:
                answers = [engine.submit(prompt, schedule=FULL, **settings) for settings in requests]
                decode_all(engine)
                for settings, answer in zip(requests, answers, strict=True):
                    assert list(answer.result(0).tokens) == alone(model, prompt, {"schedule": FULL, **settings})


def test_a_default_setting_changed_in_place_applies_to_later_requests() -> None:
    model: Any = fresh("opt")
    engine = Engine(model)
    ends = model.generation_config.eos_token_id = [3]

    def tokens() -> tuple[int, ...]:
        answer = engine.submit(PROMPT, schedule=FULL, max_new_tokens=5, do_sample=False)
        decode_all(engine)
        return answer.result(0).tokens

    first = tokens()
    ends.append(first[0])
    assert tokens() == first[:1] != first


def test_a_sequence_frees_its_slots_in_a_layer_after_the_cutoff_of_that_layer() -> None:
    schedule = SkipSchedule(6, 4, 2, horizon=4)
    cutoffs = schedule.cutoffs(9)
    engine = Engine(tiny("opt"))
    engine.submit(PROMPT, schedule=schedule, max_new_tokens=10, do_sample=False, eos_token_id=None)
    for done in range(1, 10):
        engine.step()
        needed = sum(len(PROMPT) + cutoff for cutoff in cutoffs if cutoff > done) if done < 9 else 0
        assert engine.state.slots - engine.state.free_slots == needed


def test_a_request_that_fits_later_waits_and_one_that_never_fits_is_refused() -> None:
    slot_bytes = 2 * 32 * 4
    engine = Engine(tiny("opt"), cache_bytes=6 * 30 * slot_bytes)
    how: Any = {"schedule": FULL, "do_sample": False, "eos_token_id": None}
    with pytest.raises(ConfigError, match="needs 258 KV slots over all layers, and the engine has 180"):
        engine.submit(PROMPT, max_new_tokens=40, **how)
    first, second, third = (engine.submit(PROMPT, max_new_tokens=new, **how) for new in (20, 20, 2))
    for _ in range(19):
        engine.step()
        assert (engine.state.running, engine.state.waiting) == ((1, 2) if first.times.last is None else (0, 2))
    assert engine.drain()
    assert [len(answer.result(0).tokens) for answer in (first, second, third)] == [20, 20, 2]
    assert first.times.last < second.times.admitted <= third.times.admitted  # type: ignore[operator]


def test_a_wave_is_admitted_after_wave_rows_requests_or_wave_seconds() -> None:
    how: Any = {"schedule": FULL, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    engine = Engine(tiny("opt"), wave_rows=2, wave_seconds=1e6)
    engine.submit(PROMPT, **how)
    engine.step()  # nothing decodes, so it is admitted at once
    engine.submit(PROMPT, **how)
    engine.step()
    assert (engine.state.running, engine.state.waiting) == (1, 1)
    engine.submit(PROMPT, **how)
    engine.step()
    assert (engine.state.running, engine.state.waiting) == (3, 0)
    impatient = Engine(tiny("opt"), wave_rows=2, wave_seconds=0.0)
    for _ in range(2):
        impatient.submit(PROMPT, **how)
        impatient.step()
    assert impatient.state.running == 2


def test_at_most_wave_tokens_of_prompts_run_between_two_steps() -> None:
    engine = Engine(tiny("opt"), wave_tokens=8)
    for _ in range(5):
        engine.submit(PROMPT, schedule=FULL, max_new_tokens=9, do_sample=False, eos_token_id=None)
    running = []
    for _ in range(3):
        engine.step()
        running.append(engine.state.running)
    assert running == [2, 4, 5]


def test_a_long_prompt_runs_in_chunks_while_each_other_sequence_gets_a_token_in_every_step() -> None:
    engine, how = Engine(tiny("opt"), wave_tokens=13), {"schedule": FULL, "do_sample": False, "eos_token_id": None}
    heard: list[list[Any]] = [[], []]
    for tokens in heard:
        engine.submit(PROMPT, max_new_tokens=40, listener=tokens.append, **how)
    engine.step()
    long = engine.submit(LONG, max_new_tokens=3, **how)
    computed = []
    while long.times.first is None:
        before = engine.state.prompt_tokens, [len(tokens) for tokens in heard]
        assert engine.step()
        assert [len(tokens) for tokens in heard] == [count + 1 for count in before[1]]
        computed.append(engine.state.prompt_tokens - before[0])
    assert sum(computed) == len(LONG)
    assert max(computed) <= 13
    assert len(computed) == 7
    assert engine.drain()
    assert list(long.result(0).tokens) == alone(engine.model, LONG, {"max_new_tokens": 3, **how})


@pytest.mark.parametrize("schedule", SCHEDULES[1:4], ids=str)
def test_waiting_prompts_run_in_one_batch_and_what_they_have_in_common_is_computed_once(
    schedule: SkipSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, passes = Engine(tiny("llama")), []
    prefill = ModelRunner.prefill

    def counted(runner: ModelRunner, chunks: Any) -> Any:
        passes.append([(chunk.start, chunk.end) for chunk in chunks])
        return prefill(runner, chunks)

    monkeypatch.setattr(ModelRunner, "prefill", counted)
    how: Any = {"schedule": schedule, "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    prompts = [LONG[:40] + [5 + n] * n for n in range(5)]
    answers = [engine.submit(prompt, **how) for prompt in prompts]
    assert engine.drain()
    assert passes == [[(0, 40)], [(32, 40 + n) for n in range(1, 5)]]
    assert (engine.state.prompt_tokens, engine.state.prefix_tokens) == (40 + sum(range(9, 13)), 4 * 32)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.result(0).tokens) == alone(engine.model, prompt, how)


@pytest.mark.parametrize("weights", ["packed", "int8"])
@pytest.mark.parametrize("name", ["opt", "mistral"])
def test_with_compiled_kernels_prompts_from_the_cache_and_in_chunks_give_the_same_logits(
    name: str, weights: Any
) -> None:
    """Bit for bit, under each schedule: keys and values of other layers would give others."""
    model: Any = tiny(name)
    ids = torch.tensor([LONG])
    how: Any = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    settings: Any = {**how, "attention_mask": torch.ones_like(ids), "weights": weights}
    settings |= {"return_dict_in_generate": True, "output_logits": True, "custom_generate": skip_generate}
    engine = Engine(model, weights=weights, wave_tokens=40)
    schedules = [*SCHEDULES, SkipSchedule(6, 5, 3, prompt="max")]  # of as many layers as another one, but not the same
    for first in (True, False):
        answers = [engine.submit(LONG, schedule=schedule, logprobs=1, **how) for schedule in schedules]
        before = engine.state.prefix_tokens
        decode_all(engine)
        computed = len({(schedule.prompt_layers, schedule.prompt_depth) for schedule in schedules}) if first else 0
        assert engine.state.prefix_tokens - before == 80 * (len(schedules) - computed)
        for schedule, answer in zip(schedules, answers, strict=True):
            found = model.generate(ids, schedule=schedule, **settings)
            expected = [float(logits[0].log_softmax(-1).max()) for logits in found.logits]
            assert [generated.logprob for generated in answer] == expected, schedule


def test_a_prompt_that_is_cancelled_between_two_chunks_frees_all_memory() -> None:
    engine = Engine(tiny("opt"), wave_tokens=8)
    answer = engine.submit(LONG, schedule=FULL, max_new_tokens=3)
    engine.step()
    engine.step()
    assert 0 < engine.state.prompt_tokens < len(LONG)
    assert engine.state.free_slots < engine.state.slots
    answer.cancel()
    assert not engine.step()
    assert (answer.result(0).end, answer.result(0).tokens) == ("cancelled", ())
    state = engine.state
    assert (state.running, state.free_slots, state.free_regions) == (0, state.slots, 1)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.booleans()), max_size=30),
    st.integers(1, 6),
)
def test_the_prefix_cache_keeps_its_bound_and_drops_the_least_recently_used_block_without_followers(
    prompts: list[tuple[list[int], bool]], room: int
) -> None:
    cache = PrefixCache(max_bytes=8 * room)
    used: list[tuple[int, ...]] = []  # the blocks of a naive cache, as all tokens up to their ends; the latest use last
    for numbers, adds in prompts:
        blocks = [tuple(numbers[: n + 1]) for n in range(len(numbers))]
        prompt = [number for number in numbers for _ in range(BLOCK_TOKENS)] + [0]
        keys = cache.keys(prompt, (0, 1), None)
        assert len(keys) == len(blocks)
        held = [int(block[0]) for block in cache.blocks(keys, 0)]
        assert held == [hash(block) % 1000 for block in blocks if block in used]
        if adds:
            cache.add(keys, 0, [torch.tensor([hash(block) % 1000]) for block in blocks])
        for block in blocks if adds else ():
            while block not in used and len(used) == room and used[0] != block[: len(used[0])]:
                del used[0]
            if block not in used and len(used) < room:
                used.append(block)
            used = [each for each in used if each not in blocks] + [each for each in blocks[::-1] if each in used]
        used = [each for each in used if each not in blocks] + [each for each in blocks[::-1] if each in used]
        assert (len(cache), cache.nbytes) == (len(used), 8 * len(used))
        assert cache.nbytes <= cache.max_bytes


def test_a_full_queue_and_a_closed_engine_refuse_requests() -> None:
    engine = Engine(tiny("opt"), most_waiting=1)
    waiting = engine.submit(PROMPT, schedule=FULL)
    with pytest.raises(EngineFull, match="1 requests are waiting, the maximum"):
        engine.submit(PROMPT, schedule=FULL)
    engine.close()
    assert waiting.result(0).end == "cancelled"
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit(PROMPT, schedule=FULL)


def test_a_sequence_ends_by_length_only_if_nothing_else_ends_it() -> None:
    class At(StoppingCriteria):
        """Ends a sequence at a length, like a stop string that is complete there."""

        def __init__(self, length: int) -> None:
            self.length = length

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.tensor([input_ids.shape[1] == self.length])

    def end(eos_token_id: int | None = None, *criteria: StoppingCriteria) -> str:
        engine, more = Engine(tiny("opt")), StoppingCriteriaList(criteria)
        how: Any = {"schedule": FULL, "max_new_tokens": 5, "do_sample": False, "eos_token_id": eos_token_id}
        answer = engine.submit(PROMPT, stopping_criteria=more, **how)
        assert engine.drain()
        tokens.append(answer.result(0).tokens)
        return answer.result(0).end

    tokens: list[tuple[int, ...]] = []
    prompt = len(PROMPT)
    assert end() == "length"
    assert end(tokens[0][-1]) == "stop"
    assert [end(None, At(prompt + n)) for n in (4, 5, 6)] == ["stop", "stop", "length"]
    assert end(None, MaxLengthCriteria(prompt + 3)) == "length"
    assert [len(each) for each in tokens[2:]] == [4, 5, 5, 3]


@pytest.mark.parametrize("place", [0, 2, 5])  # the last one ends the sequence
def test_a_listener_that_raises_fails_only_its_own_request(place: int) -> None:
    engine, heard = Engine(tiny("opt")), []
    how: Any = {"schedule": FULL, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}

    def listen(generated: Any) -> None:
        heard.append(generated)
        if len(heard) == place + 1:
            raise RuntimeError("a listener")

    before, own, after = (engine.submit(PROMPT, listener=each, **how) for each in (None, listen, None))
    assert engine.drain()
    assert before.result(0).tokens == after.result(0).tokens
    assert len(heard) == place + 1
    if place == 5:
        assert own.result(0).tokens == before.result(0).tokens
    else:
        with pytest.raises(RuntimeError, match="a listener"):
            own.result(0)


@pytest.mark.parametrize(("made", "submitted"), [(True, True), (True, False), (False, True)])
def test_an_engine_works_for_callers_in_inference_mode(made: bool, submitted: bool) -> None:
    expected = tiny("opt").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.inference_mode(made):
        engine = Engine(tiny("opt"))
    with engine, torch.inference_mode(submitted):
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        answer = engine.submit([5, 6, 7], schedule=FULL, **settings)
        assert list(answer.result(30).tokens) == expected[0, 3:].tolist()


def test_each_iteration_over_an_answer_gives_all_its_tokens() -> None:
    engine = Engine(tiny("opt"))
    how: Any = {"schedule": FULL, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    answer, heard = engine.submit(PROMPT, **how), engine.submit(PROMPT, listener=lambda _: None, **how)
    assert engine.drain()
    for _ in range(2):
        assert [generated.token for generated in answer] == list(answer.result(0).tokens)
    with pytest.raises(ConfigError, match="the tokens go to the listener"):
        next(iter(heard))


@pytest.mark.parametrize("ending", ["closed", "failed"])
def test_drain_returns_false_if_the_engine_closes_or_fails_meanwhile(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            time.sleep(0.02)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    found: list[bool] = []
    engine: Any = Engine(tiny("opt")).__enter__()
    how: Any = {"schedule": FULL, "max_new_tokens": 90, "do_sample": False, "eos_token_id": None}
    engine.submit(PROMPT, stopping_criteria=StoppingCriteriaList([Slow()]), **how)
    waits = threading.Thread(target=lambda: found.append(engine.drain()), daemon=True)
    waits.start()
    time.sleep(0.1)
    if ending == "closed":
        engine.close()
    else:
        engine.step = None  # calling it raises TypeError in the engine's thread
    waits.join(3)
    assert found == [False]


def test_drain_also_waits_for_a_request_that_is_just_being_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny("opt")) as engine:
        keys, drained = engine._prefixes.keys, threading.Event()

        def drain() -> None:
            engine.drain()
            drained.set()

        def admitted_slowly(*args: Any) -> list[bytes]:
            threading.Thread(target=drain, daemon=True).start()
            assert not drained.wait(0.2)
            return keys(*args)

        monkeypatch.setattr(engine._prefixes, "keys", admitted_slowly)
        answer = engine.submit(PROMPT, schedule=FULL, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert len(answer.result(10).tokens) == 3
        assert drained.wait(10)


def test_a_logits_processor_that_raises_fails_only_its_own_request() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] > len(PROMPT) + 2:
                raise RuntimeError("of its own")
            return scores

    engine = Engine(tiny("opt"))
    how: Any = {"schedule": FULL, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    broken = engine.submit(PROMPT, logits_processor=LogitsProcessorList([Broken()]), **how)
    other = engine.submit(PROMPT, **how)
    assert engine.drain()
    with pytest.raises(RuntimeError, match="of its own"):
        broken.result(0)
    assert len(other.result(0).tokens) == 6
    assert engine.state.free_slots == engine.state.slots


def test_logprobs_are_those_of_the_model_before_sampling_settings() -> None:
    model: Any = fresh("opt").double()
    engine = Engine(model)
    how: Any = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.5, "eos_token_id": None}
    answer = engine.submit(PROMPT, schedule=FULL, seed=3, logprobs=2, **how)
    assert engine.drain()
    generated = list(answer)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *(each.token for each in generated)]])).logits[0]
    logprobs = logits.float().log_softmax(-1)
    for n, each in enumerate(generated, start=len(PROMPT) - 1):
        assert each.logprob == pytest.approx(float(logprobs[n, each.token]), abs=1e-5)
        assert [token for token, _ in each.top] == logprobs[n].topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"lossless": True}, "names no speed above 1"),
        ({"lossless": True, "over": "all"}, "over is 'all' without a speedup"),
        ({"speedup": 2}, "doesn't say what schedules it was trained for"),
        ({"schedule": FULL, "num_beams": 2}, "num_beams is 2"),
        ({"schedule": FULL, "do_sample": True, "num_return_sequences": 2}, "num_return_sequences is 2"),
        ({"schedule": FULL, "max_new_tokens": 200}, "positions are needed and the model has 96"),
        ({"schedule": FULL, "seed": "7"}, "seed is '7'"),
        ({"schedule": FULL, "logprobs": -1}, "logprobs is -1"),
        ({"schedule": FULL, "logprobs": 2.5}, f"logprobs is 2.5: it must be a number of tokens from 0 to {VOCABULARY}"),
        ({"schedule": FULL, "logprobs": VOCABULARY + 1}, f"logprobs is {VOCABULARY + 1}"),
        ({"schedule": FULL, "lossless": "no"}, "lossless is 'no'"),
        ({"schedule": FULL, "position_ids": torch.zeros(1, 4)}, "position_ids is given"),
        ({"schedule": FULL, "do_sample": True, "temperature": 1e-300}, "temperature is 1e-300: it must be at least"),
        ({"schedule": FULL, "foo": 1}, "generate refuses these settings: .*'foo'"),
        ({"schedule": FULL, "stop_strings": "a"}, "generate refuses these settings: .*stop strings"),
        ({"schedule": FULL, "sequence_bias": {(-1,): 5.0}}, "generate refuses these settings: .*-1"),
        ({}, "schedule is missing"),
    ],
)
def test_a_request_that_cannot_be_decoded_is_refused(request_: dict[str, Any], message: str) -> None:
    engine = Engine(tiny("opt"))
    with pytest.raises(ConfigError, match=message):
        engine.submit(PROMPT, **request_)
    for prompt in ([], [VOCABULARY], [-1], [5.0, 6.5], [True], ["a"], torch.tensor([5, 6])):
        with pytest.raises(ConfigError, match="prompt"):
            engine.submit(prompt, schedule=FULL)  # type: ignore[arg-type]
    assert engine.state.waiting == 0


def test_a_model_without_fast_path_is_refused_with_the_reason() -> None:
    model = fresh("opt")
    model.register_forward_hook(lambda *_: None)
    model.model.decoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"an engine can't decode with this model: .* has hooks"):
        Engine(model)
    with pytest.raises(ConfigError, match="cache_bytes is 10"):
        Engine(tiny("opt"), cache_bytes=10)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_slots_are_never_allocated_twice_and_all_are_freed(sizes: list[int], draw: random.Random) -> None:
    pool = KVPool(12, 1, 1, torch.float32, torch.device("cpu"))
    held: list[Span] = []
    for size in sizes:
        before = pool.free_slots
        allocated = pool.allocate([size, 1])
        if allocated is None:
            assert pool.free_slots == before
        held += allocated or []
        slots = [slot for span in held for slot in range(span.start, span.start + span.slots)]
        assert len(slots) == len(set(slots)) == 12 - pool.free_slots
        assert not slots or max(slots) < 12
        while held and draw.random() < 0.4:
            pool.free(held.pop(draw.randrange(len(held))))
    for span in held:
        pool.free(span)
    assert (pool.free_slots, pool.free_regions) == (12, 1)


@given(st.lists(st.sets(st.integers(1, 4)).map(lambda layers: (0, *sorted(layers))), min_size=1, max_size=9))
def test_within_a_nested_group_the_tokens_that_run_a_layer_are_the_first_ones(
    layer_sets: list[tuple[int, ...]],
) -> None:
    groups = nested_groups(layer_sets)
    assert sorted(token for group in groups for token in group) == list(range(len(layer_sets)))
    for group in groups:
        sets = [layer_sets[token] for token in group]
        for layer, count in zip(sets[0], prefix_lengths(sets), strict=True):
            assert [layer in layers for layers in sets] == [n < count for n in range(len(sets))]
