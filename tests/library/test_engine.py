"""An engine's texts are those of each prompt alone, whatever decodes beside it, and afterwards nothing is held."""

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
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from skipdecode import ConfigError, Engine, SkipSchedule, skip_generate
from skipdecode.engine.engine import EngineClosed, EngineFull
from skipdecode.engine.kv_pool import Arena, Span
from skipdecode.engine.ragged_inputs import nested_groups, prefix_lengths
from skipdecode.engine.sequence import Answer

PROMPT = [5, 9, 30, 7]
FULL = SkipSchedule.full_depth(6)


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_among_others_are_those_of_their_prompts_alone(name: str) -> None:
    assert play(name, torch.float64, 60, seed=1) > 0


@pytest.mark.parametrize("name", ["opt", "qwen3", "bloom", "mistral", "opt-350m"])
def test_so_are_they_with_the_compiled_kernels_in_float32(name: str) -> None:
    assert play(name, torch.float32, 40, seed=2) > 0


def test_so_are_they_in_waves() -> None:
    assert play("opt", torch.float64, 40, seed=3, wave_rows=3, wave_seconds=60.0) > 0


def test_so_are_they_where_threads_submit_and_a_thread_decodes() -> None:
    model: Any = tiny("llama")
    found: dict[int, tuple[int, ...]] = {}
    with Engine(model, most_rows=4) as engine:

        def ask(number: int) -> None:
            prompt = [4 + number] * (1 + number % 5)
            answer = engine.submit(prompt, schedule=SCHEDULES[number % 3], max_new_tokens=8, do_sample=False)
            tokens = [chosen.token for chosen in answer]
            assert tuple(tokens) == answer.result(10).tokens
            found[number] = tuple(tokens)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
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


def test_so_are_they_where_threads_change_places_at_any_moment() -> None:
    how: Any = {"schedule": SCHEDULES[1], "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Engine(tiny("opt"), most_rows=3, most_waiting=2000) as engine:

            def ask(number: int) -> list[Answer]:
                return [engine.submit([4 + number] * 3, **how) for _ in range(120)]

            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(ask, range(4)))
            found[0][-1].cancel()
            assert engine.drain(60)
            texts = [{answer.result(0).tokens for answer in answers} for answers in found]
    finally:
        sys.setswitchinterval(interval)
    assert [len(text) for text in texts[1:]] == [1, 1, 1]


def test_lossless_texts_draft_where_few_decode_and_take_what_full_depth_chooses_too() -> None:
    how: Any = {"lossless": True, "max_new_tokens": 18, "do_sample": False, "eos_token_id": None}
    engine = Engine(tiny("opt"))
    engine.submit(PROMPT, schedule=FULL, **how)  # drafts by all layers are all right
    assert engine.drain()
    # Behind the prompt's token: 4 drafts and a token more, 5 and one more, and 5 again, as no more may come.
    assert (engine.state.tokens, engine.state.steps, engine.state.rows) == (18, 5 + 6 + 6, 9 + 11 + 11)
    engine = Engine(tiny("opt"))
    answers = [engine.submit(PROMPT, schedule=SCHEDULES[1], **how) for _ in range(5)]
    assert engine.drain()
    assert engine.state.rows == engine.state.tokens - 5  # too many: full depth alone
    assert len({answer.result(0).tokens for answer in answers}) == 1


def test_what_is_kept_of_a_request_is_only_what_the_next_one_asks_for_too() -> None:
    model: Any = fresh("opt")
    engine = Engine(model)
    prompts = [PROMPT, [7, 7, 7, 7], [9, 8]]
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 5, "do_sample": False},
        {"max_new_tokens": 7, "do_sample": False},
        {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 11},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 1.7, "seed": 3},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 0.6, "seed": 3},
        {"max_new_tokens": 5, "do_sample": False, "repetition_penalty": 5.0},
        {"max_new_tokens": 5, "do_sample": False, "sequence_bias": {(40,): 9.0}},
    ]
    for default in (None, 40):  # a default that is changed holds from then on
        model.generation_config.eos_token_id = default
        for _ in range(2):
            for prompt in prompts:
                answers = [engine.submit(prompt, schedule=FULL, **settings) for settings in asked]
                assert engine.drain()
                engine._draining = False
                for settings, answer in zip(asked, answers, strict=True):
                    assert list(answer.result(0).tokens) == alone(model, prompt, {"schedule": FULL, **settings})


def test_a_default_that_is_changed_in_place_holds_from_then_on() -> None:
    model: Any = fresh("opt")
    engine = Engine(model)
    ends = model.generation_config.eos_token_id = [3]

    def tokens() -> tuple[int, ...]:
        answer = engine.submit(PROMPT, schedule=FULL, max_new_tokens=5, do_sample=False)
        assert engine.drain()
        engine._draining = False
        return answer.result(0).tokens

    first = tokens()
    ends.append(first[0])
    assert tokens() == first[:1] != first


def test_a_text_gives_back_the_columns_of_a_layer_when_it_has_passed_its_cutoff() -> None:
    schedule = SkipSchedule(6, 4, 2, horizon=4)
    cutoffs = schedule.cutoffs(9)
    engine = Engine(tiny("opt"))
    engine.submit(PROMPT, schedule=schedule, max_new_tokens=10, do_sample=False, eos_token_id=None)
    for done in range(1, 10):
        engine.step()
        held = sum(len(PROMPT) + cutoff for cutoff in cutoffs if cutoff > done) if done < 9 else 0
        assert engine.state.columns - engine.state.free_columns == held


def test_what_fits_later_waits_its_turn_and_what_never_fits_is_refused() -> None:
    column = 2 * 32 * 4
    engine = Engine(tiny("opt"), cache_bytes=6 * 30 * column)
    how: Any = {"schedule": FULL, "do_sample": False, "eos_token_id": None}
    with pytest.raises(
        ConfigError, match="needs 258 columns of keys and values over all layers, and the engine has 180"
    ):
        engine.submit(PROMPT, max_new_tokens=40, **how)
    first, second, third = (engine.submit(PROMPT, max_new_tokens=new, **how) for new in (20, 20, 2))
    for _ in range(19):
        engine.step()
        assert (engine.state.running, engine.state.waiting) == ((1, 2) if first.times.last is None else (0, 2))
    assert engine.drain()
    assert [len(answer.result(0).tokens) for answer in (first, second, third)] == [20, 20, 2]
    assert first.times.last < second.times.admitted <= third.times.admitted  # type: ignore[operator]


def test_a_wave_waits_for_so_many_or_so_long_while_texts_decode() -> None:
    how: Any = {"schedule": FULL, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    engine = Engine(tiny("opt"), wave_rows=2, wave_seconds=1e6)
    engine.submit(PROMPT, **how)
    engine.step()  # nobody decodes: it is admitted at once
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


def test_prompts_between_two_steps_are_few() -> None:
    engine = Engine(tiny("opt"), wave_tokens=8)
    for _ in range(5):
        engine.submit(PROMPT, schedule=FULL, max_new_tokens=9, do_sample=False, eos_token_id=None)
    running = []
    for _ in range(3):
        engine.step()
        running.append(engine.state.running)
    assert running == [2, 4, 5]


def test_a_full_queue_and_a_closed_engine_take_nothing() -> None:
    engine = Engine(tiny("opt"), most_waiting=1)
    waiting = engine.submit(PROMPT, schedule=FULL)
    with pytest.raises(EngineFull, match="1 requests wait already"):
        engine.submit(PROMPT, schedule=FULL)
    engine.close()
    assert waiting.result(0).end == "cancelled"
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit(PROMPT, schedule=FULL)


def test_a_text_ends_by_length_where_nothing_else_ends_it() -> None:
    class At(StoppingCriteria):
        """As a stop string that is complete with so many columns."""

        def __init__(self, columns: int) -> None:
            self.columns = columns

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.tensor([input_ids.shape[1] == self.columns])

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


def test_what_a_lossless_speed_is_of_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match="over is 'all' without a speedup"):
        Engine(tiny("opt")).submit(PROMPT, lossless=True, over="all", max_new_tokens=3)


@pytest.mark.parametrize("place", [0, 2, 5])  # the last one is the text's end
def test_a_listener_that_raises_fails_its_own_text_alone(place: int) -> None:
    engine, heard = Engine(tiny("opt")), []
    how: Any = {"schedule": FULL, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}

    def listen(chosen: Any) -> None:
        heard.append(chosen)
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
def test_an_engine_of_a_caller_in_inference_mode_decodes(made: bool, submitted: bool) -> None:
    expected = tiny("opt").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.inference_mode(made):
        engine = Engine(tiny("opt"))
    with engine, torch.inference_mode(submitted):
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        answer = engine.submit([5, 6, 7], schedule=SkipSchedule.full_depth(6), **settings)
        assert list(answer.result(30).tokens) == expected[0, 3:].tolist()


def test_an_answer_gives_its_tokens_to_each_who_iterates() -> None:
    engine = Engine(tiny("opt"))
    how: Any = {"schedule": FULL, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    answer, heard = engine.submit(PROMPT, **how), engine.submit(PROMPT, listener=lambda _: None, **how)
    assert engine.drain()
    found: list[list[int]] = []
    reads = threading.Thread(
        target=lambda: found.extend([chosen.token for chosen in answer] for _ in range(2)), daemon=True
    )
    reads.start()
    reads.join(3)
    assert found == [list(answer.result(0).tokens)] * 2
    with pytest.raises(ConfigError, match="the tokens go to the listener"):
        next(iter(heard))


@pytest.mark.parametrize("ending", ["closed", "failed"])
def test_who_waits_for_the_end_of_all_texts_learns_that_the_engine_ended_before(
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
        engine._admit = None  # a fault of its own
    waits.join(3)
    assert found == [False]


def test_a_processor_that_fails_ends_its_own_text_alone() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] > len(PROMPT) + 2:
                raise RuntimeError("of its own")
            return scores

    engine = Engine(tiny("opt"))
    how: Any = {"schedule": FULL, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    broken = engine.submit(PROMPT, logits_processor=LogitsProcessorList([Broken()]), **how)
    whole = engine.submit(PROMPT, **how)
    assert engine.drain()
    with pytest.raises(RuntimeError, match="of its own"):
        broken.result(0)
    assert len(whole.result(0).tokens) == 6
    assert engine.state.free_columns == engine.state.columns


def test_probabilities_are_the_models_own() -> None:
    model: Any = fresh("opt").double()
    engine = Engine(model)
    how: Any = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.5, "eos_token_id": None}
    answer = engine.submit(PROMPT, schedule=FULL, seed=3, logprobs=2, **how)
    assert engine.drain()
    chosen = list(answer)
    with torch.no_grad():
        whole = model(torch.tensor([[*PROMPT, *(each.token for each in chosen)]])).logits[0].float().log_softmax(-1)
    for n, each in enumerate(chosen):
        row = whole[len(PROMPT) - 1 + n]
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-5)
        assert [token for token, _ in each.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"lossless": True}, "names no speed above 1"),
        ({"speedup": 2}, "doesn't say what schedules it was trained for"),
        ({"schedule": FULL, "num_beams": 2}, "num_beams is 2"),
        ({"schedule": FULL, "do_sample": True, "num_return_sequences": 2}, "num_return_sequences is 2"),
        ({"schedule": FULL, "max_new_tokens": 200}, "positions are needed and the model has 96"),
        ({"schedule": FULL, "seed": "7"}, "seed is '7'"),
        ({"schedule": FULL, "logprobs": -1}, "logprobs is -1"),
        ({"schedule": FULL, "logprobs": True}, "logprobs is True"),
        ({"schedule": FULL, "logprobs": 2.5}, f"logprobs is 2.5: it must be a number of tokens from 0 to {VOCABULARY}"),
        ({"schedule": FULL, "logprobs": VOCABULARY + 1}, f"logprobs is {VOCABULARY + 1}"),
        ({"schedule": FULL, "lossless": "no"}, "lossless is 'no'"),
        ({"schedule": FULL, "position_ids": torch.zeros(1, 4)}, "position_ids is given"),
        (
            {"schedule": FULL, "do_sample": True, "temperature": 1e-300},
            "temperature is 1e-300: it must be at least 1e-05",
        ),
        ({"schedule": FULL, "foo": 1}, "generate refuses these settings: .*'foo'"),
        ({"schedule": FULL, "stop_strings": "a"}, "generate refuses these settings: .*stop strings"),
        ({"schedule": FULL, "sequence_bias": {(-1,): 5.0}}, "generate refuses these settings: .*-1"),
        ({}, "schedule is missing"),
    ],
)
def test_what_cannot_be_decoded_is_refused(request_: dict[str, Any], message: str) -> None:
    engine = Engine(tiny("opt"))
    with pytest.raises(ConfigError, match=message):
        engine.submit(PROMPT, **request_)
    for prompt in ([], [VOCABULARY], [-1], [5.0, 6.5], [True], ["a"], torch.tensor([5, 6])):
        with pytest.raises(ConfigError, match="prompt"):
            engine.submit(prompt, schedule=FULL)  # type: ignore[arg-type]
    assert engine.state.waiting == 0


def test_a_model_without_a_fast_path_is_refused_with_the_reason() -> None:
    model = fresh("opt")
    model.register_forward_hook(lambda *_: None)
    model.model.decoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"an engine can't decode with this model: .* has hooks"):
        Engine(model)
    with pytest.raises(ConfigError, match="cache_bytes is 10"):
        Engine(tiny("opt"), cache_bytes=10)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_columns_are_never_held_twice_and_all_come_back(sizes: list[int], draw: random.Random) -> None:
    arena = Arena(12, 1, 1, torch.float32, torch.device("cpu"))
    held: list[Span] = []
    for size in sizes:
        before = arena.free
        taken = arena.take([size, 1])
        if taken is None:
            assert arena.free == before
        held += taken or []
        columns = [column for span in held for column in range(span.start, span.start + span.columns)]
        assert len(columns) == len(set(columns)) == 12 - arena.free
        assert not columns or max(columns) < 12
        while held and draw.random() < 0.4:
            arena.give(held.pop(draw.randrange(len(held))))
    for span in held:
        arena.give(span)
    assert (arena.free, arena.gaps) == (12, 1)


@given(st.lists(st.sets(st.integers(1, 4)).map(lambda layers: (0, *sorted(layers))), min_size=1, max_size=9))
def test_in_a_group_the_texts_that_run_a_layer_are_the_first_ones(layer_sets: list[tuple[int, ...]]) -> None:
    groups = nested_groups(layer_sets)
    assert sorted(text for group in groups for text in group) == list(range(len(layer_sets)))
    for group in groups:
        own = [layer_sets[text] for text in group]
        for layer, count in zip(own[0], prefix_lengths(own), strict=True):
            assert [layer in layers for layers in own] == [n < count for n in range(len(own))]
