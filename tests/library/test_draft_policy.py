"""Draft policies draft nearly the best number of tokens, and few if drafts don't save time."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from fastpath_cases import SCHEDULES, fresh, generate
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import ConfigError, CostModel, Engine, SkipSchedule, skip_generate
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.draft_policy import MAX_DRAFTS, AcceptedPlusOne, CostDraftPolicy, VerifiedRound
from skipdecode.generate.draft_record import DraftRecord, optimistic_rejection_rates
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.pass_seconds import pass_seconds
from skipdecode.generate.skip_generate import choose_draft, resolve_plan
from skipdecode.kernels.cpu import kernels
from skipdecode.schedule.machine_profile import Profile, TimedBatch
from skipdecode.timing.compare import Decoder

LAYERS = 12


def speed(
    acceptance_rate: float,
    draft: int,
    position: float,
    tokens: int,
    record: DraftRecord,
    sequences: int = 1,
    overhead: float | None = None,
    predicted: float = 1.0,
    first: float = 0.0,
) -> float:
    """The simulated speedup over full depth.

    Args:
        acceptance_rate: probability that a draft is accepted.
        draft: layers that a draft runs.
        position: cost of a further position in a pass, in steps of full depth.
        tokens: new tokens of each sequence.
        record: of the drafts.
        sequences: in the batch.
        overhead: time of a round with drafts beyond its passes, in steps; None if rounds aren't timed.
        predicted: predicted cost of drafts and verified positions, divided by their real cost.
        first: additional cost of the first position that a pass verifies.
    """

    def seconds(layers: int, passed: int) -> float:
        return layers / LAYERS + position * (passed - 1) + first * (layers == LAYERS and passed > sequences)

    def predicted_seconds(layers: int, passed: int) -> float:
        if layers == LAYERS and passed == sequences:
            return seconds(layers, passed)
        depth_cost = predicted * layers / LAYERS if layers < LAYERS else 1 + first
        return depth_cost + predicted * position * (passed - 1)

    policy = CostDraftPolicy(record, predicted_seconds, LAYERS)
    cost = given = 0.0
    while given < tokens * sequences:
        if overhead is not None and not policy.has_pace:
            policy.learn_pace(sequences, 4, 4 * seconds(LAYERS, sequences))
            cost += 4 * seconds(LAYERS, sequences)
            given += 4 * sequences
            continue
        rule = policy.rule(sequences, [draft] * MAX_DRAFTS)
        drafted, reach, took = [0] * sequences, [1.0] * sequences, 0.0
        for threshold in rule.min_probabilities:
            drafting = [n for n in range(sequences) if drafted[n] == max(drafted) and reach[n] > threshold]
            took += seconds(draft, len(drafting)) if drafting else 0.0
            for n in drafting:
                drafted[n] += 1
                reach[n] *= rule.acceptance_rate(0.8)
        took += seconds(LAYERS, sequences + sum(drafted)) + (overhead or 0.0) * any(drafted)
        agreed = [[*(random.random() < acceptance_rate for _ in range(count)), False] for count in drafted]
        accepted = [each.index(False) for each in agreed]
        new = sequences + sum(accepted)
        probabilities = [[0.8] * count for count in drafted]
        timed = None if overhead is None else took
        policy.learn(VerifiedRound(sequences, new, drafted, accepted, probabilities, timed))
        cost += took
        given += new
    return given / sequences * seconds(LAYERS, sequences) / cost


def best_speed(
    acceptance_rate: float, draft: int, position: float, sequences: int, overhead: float = 0.0, first: float = 0.0
) -> float:
    """The expected speedup with the best constant number of drafts."""
    step, best = 1 + position * (sequences - 1), 1.0
    for drafts in range(1, MAX_DRAFTS + 1):
        given = sum(acceptance_rate**n for n in range(drafts + 1))
        drafting = drafts * (draft / LAYERS + position * (sequences - 1))
        verification = 1 + position * (sequences * (drafts + 1) - 1) + first
        best = max(best, given * step / (drafting + verification + overhead))
    return best


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize(("draft", "position"), [(2, 0.02), (4, 0.1), (6, 0.05)])
@pytest.mark.parametrize("rate", [0, 0.3, 0.6, 0.85, 0.95, 1])
def test_the_speed_is_near_the_best_and_hardly_ever_below_full_depths(
    rate: float, draft: int, position: float, sequences: int
) -> None:
    random.seed(1)
    best = best_speed(rate, draft, position, sequences)
    assert speed(rate, draft, position, 2000, DraftRecord(), sequences) > 0.94 * best
    assert all(speed(0, draft, position, 32, DraftRecord(), sequences) > 0.94 for _ in range(9))


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("first", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("rate", [0, 0.6, 0.85, 0.95, 0.98])
def test_the_speed_is_near_the_best_if_the_first_verified_position_costs_more(
    rate: float, first: float, sequences: int
) -> None:
    random.seed(1)
    best = best_speed(rate, 2, 0.02, sequences, first=first)
    assert speed(rate, 2, 0.02, 4000, DraftRecord(), sequences, first=first) > 0.9 * best


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("overhead", [0, 0.3, 0.6])
@pytest.mark.parametrize("rate", [0, 0.3, 0.6, 0.85, 0.95])
def test_the_speed_is_near_the_best_if_timed_rounds_have_an_overhead(
    rate: float, overhead: float, sequences: int
) -> None:
    random.seed(1)
    best = best_speed(rate, 3, 0.03, sequences, overhead)
    assert speed(rate, 3, 0.03, 4000, DraftRecord(), sequences, overhead) > 0.9 * best
    assert speed(rate, 3, 0.03, 4000, DraftRecord(), sequences, 4 * overhead) > 0.97, "for any overhead"


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("predicted", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("rate", [0.6, 0.85, 0.95, 1])
def test_timed_rounds_correct_wrong_predictions_of_costs(rate: float, predicted: float, sequences: int) -> None:
    random.seed(1)
    best = best_speed(rate, 3, 0.05, sequences)
    found = speed(rate, 3, 0.05, 4000, DraftRecord(), sequences, overhead=0, predicted=predicted)
    assert found > 0.97
    assert found > 0.7 * best


def test_one_slow_round_does_not_end_drafting() -> None:
    record = DraftRecord()
    policy = CostDraftPolicy(record, lambda layers, tokens: layers / LAYERS, LAYERS)
    policy.learn_pace(1, 16, 16.0)
    for seconds in [1.5] * 20 + [500.0] + [1.5] * 20:
        count = len(policy.rule(1, [3] * MAX_DRAFTS).min_probabilities)
        policy.learn(VerifiedRound(1, 1 + count, [count], [count], [[0.95] * count], seconds))
    assert count > 3


def test_full_depth_is_timed_again_after_some_rounds() -> None:
    policy = CostDraftPolicy(DraftRecord(), lambda layers, tokens: layers / LAYERS, LAYERS)
    assert not policy.has_pace
    policy.learn_pace(1, 16, 16.0)
    for _ in range(1000):
        if not policy.has_pace:
            return
        count = len(policy.rule(1, [3] * MAX_DRAFTS).min_probabilities)
        policy.learn(VerifiedRound(1, 1 + count, [count], [count], [[0.95] * count], 1.5))
    pytest.fail("full depth is never timed again")


def test_drafts_that_never_save_time_become_rare() -> None:
    policy = CostDraftPolicy(DraftRecord(), lambda layers, tokens: layers / LAYERS, LAYERS)
    tried: list[int] = []
    for step in range(200):
        drafted = not policy.rests and len(policy.rule(1, [3] * MAX_DRAFTS).min_probabilities) > 0
        if drafted:
            policy.learn(VerifiedRound(1, 1, [1], [0], [[0.95]]))
            tried.append(step)
        else:
            policy.learn_pace(1, 1, 1.0)
    assert tried[:4] == [0, 1, 2, 3], "the initial budget is one step, and each draft costs a quarter"
    assert all(after - before > 20 for before, after in pairwise(tried[3:]))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), min_size=1, max_size=12))
def test_one_draft_more_than_were_accepted_is_made_without_timings(rounds: list[tuple[int, int]]) -> None:
    policy = AcceptedPlusOne()
    for accepted, room in rounds:
        count = len(policy.rule(1, [3] * room).min_probabilities)
        assert 1 <= count <= room
        accepted = min(accepted, count)
        policy.learn(VerifiedRound(1, 1 + accepted, [count], [accepted]))
        assert len(policy.rule(1, [3] * 99).min_probabilities) in (accepted + 1, accepted), "or as many, at the maximum"


def test_nothing_is_drafted_after_an_improbable_draft() -> None:
    record = DraftRecord()
    for _ in range(100):
        record.add(0.2, False)
        record.add(0.95, True)
    policy = CostDraftPolicy(record, lambda layers, tokens: layers / LAYERS, LAYERS)
    record.budget = 9
    rule = policy.rule(2, [3] * MAX_DRAFTS)
    assert rule.min_probabilities[0] < 1
    improbable, probable = rule.acceptance_rate(0.2), rule.acceptance_rate(0.95)
    assert (improbable, probable) == (record.acceptance_rate(0.2), record.acceptance_rate(0.95))
    assert improbable < rule.min_probabilities[1] < probable


def test_pass_seconds_follow_the_profile_and_beyond_it_the_larger_of_two_extrapolations() -> None:
    sizes = CostModel.of(fresh("opt"))
    analytical = pass_seconds(sizes, None, 64)
    assert analytical(6, 8) > analytical(6, 1) > analytical(2, 1)
    batches = tuple(
        TimedBatch(rows, 64, 64, {1: 1.0 + rows, 6: 6.0 + rows}, {1: 1.0, 6: 2.0}, {1: 0.0, 6: 0.0}) for rows in (1, 8)
    )
    measured = pass_seconds(sizes, Profile({}, 6, batches, "today"), 64)
    assert [measured(6, 1), measured(6, 8), measured(6, 4)] == pytest.approx([7, 14, 10])
    assert measured(6, 16) == pytest.approx(14 * analytical(6, 16) / analytical(6, 8))
    dearer = TimedBatch(12, 64, 64, {1: 9.0, 6: 30.0}, {1: 1.0, 6: 2.0}, {1: 0.0, 6: 0.0})
    steep = pass_seconds(sizes, Profile({}, 6, (*batches, dearer), "today"), 64)
    assert steep(6, 16) == pytest.approx(30 + 4 * (30 - 14) / 4), "linear in the two largest batches"


@pytest.mark.skipif(kernels() is None, reason="without kernels, drafts use the same weights as full depth")
def test_the_time_of_uncalibrated_draft_weights_is_scaled_by_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("opt")
    sizes, solved = CostModel.of(model), fast_path(model).solved()
    analytical, fewer = (pass_seconds(sizes.stored_as(weights), None, 64) for weights in (None, "int8"))
    full, drafts = solved.lossless_costs(model, "packed", "int8", 64)
    assert (full(6, 1), drafts(2, 1)) == (analytical(6, 1), fewer(2, 1))
    timed = Profile({}, 6, (TimedBatch(1, 64, 64, {1: 1.0, 6: 6.0}, {1: 1.0, 6: 2.0}, {1: 0.0, 6: 0.0}),), "today")
    monkeypatch.setattr(solved, "profile", lambda model, weights: timed if weights == "packed" else None)
    full, drafts = solved.lossless_costs(model, "packed", "int8", 64)
    assert full(6, 1) == pytest.approx(6)
    assert drafts(2, 1) == pytest.approx(full(2, 1) * fewer(2, 1) / analytical(2, 1))
    monkeypatch.setattr(solved, "profile", lambda model, weights: timed)
    assert solved.lossless_costs(model, "packed", "int8", 64)[1](2, 1) == pytest.approx(full(2, 1))


def test_the_draft_depth_that_is_expected_to_be_fastest_is_chosen() -> None:
    model, prompts = fresh("opt"), [5, 7]
    with pytest.raises(ConfigError, match="lossless is True without a schedule or a speedup"):
        choose_draft(model, prompts)
    fastest = SkipSchedule(6, 3, 1, horizon=8)
    trained = {1.0: SkipSchedule.full_depth(6), 2.0: SkipSchedule(6, 5, 2, horizon=8), 3.0: fastest}
    model.config.skipdecode = SkipConfig(trained, solver={"horizon": 8}).to_dict()
    one, two = (replace(fastest, max_layers=n, min_layers=n) for n in (1, 2))
    fast = fast_path(model)
    weights = fast.decoder().weights
    assert choose_draft(model, prompts) != one, "a deeper draft is expected to be rejected half as often"
    for candidate in fast_path(model).solved().draft_candidates():
        for _ in range(500):
            fast.draft_record(weights, candidate, do_sample=False).add(0.8, candidate == two)
    assert choose_draft(model, prompts) == two
    for _ in range(2000):
        fast.draft_record(weights, one, do_sample=False).add(0.8, True)
    assert choose_draft(model, prompts) == one
    sampled = choose_draft(model, prompts, do_sample=True)
    assert sampled != one, "a seed gives the same output, whatever was decoded before"


def test_unknown_rejection_rates_are_half_the_shallower_and_at_most_twice_the_deeper_ones() -> None:
    assert optimistic_rejection_rates([None] * 4) == pytest.approx([0.2, 0.1, 0.05, 0.025])
    assert optimistic_rejection_rates([0.12, None, None, 0.02]) == pytest.approx([0.12, 0.06, 0.03, 0.02])
    assert optimistic_rejection_rates([None, None, 0.004, 0.02]) == pytest.approx([0.016, 0.008, 0.004, 0.02])
    assert optimistic_rejection_rates([0.9, 0.9, 0.9, 0.9]) == [0.9] * 4


def test_greedy_calls_share_a_draft_record_and_sampled_calls_do_not() -> None:
    model = fresh("opt")
    fast = fast_path(model)
    weights = fast.decoder().weights
    request: dict[str, Any] = {"lossless": True, "max_new_tokens": 30}
    generate(model, [5], SCHEDULES[0], **request)
    kept = fast.draft_record(weights, SCHEDULES[0], do_sample=False)
    with_logits = fast.draft_record(weights, SCHEDULES[0], "logits", do_sample=False)
    assert not with_logits.pace, "each kind of loop has its own times"
    generate(model, [5], SCHEDULES[0], **request, repetition_penalty=1.1)
    assert with_logits.pace
    assert kept.acceptance_rate() < 0.75 < DraftRecord().acceptance_rate()
    generate(model, [5], SCHEDULES[0], **{**request, "do_sample": True})
    assert fast.draft_record(weights, SCHEDULES[0], do_sample=False) is kept
    assert fast.draft_record(weights, SCHEDULES[0], do_sample=True).acceptance_rate() == DraftRecord().acceptance_rate()
    other = fast.draft_record(weights, replace(SCHEDULES[0], horizon=9), do_sample=False)
    assert other.acceptance_rate() == DraftRecord().acceptance_rate()


def test_a_lossless_speedup_refers_to_decoding_even_if_the_model_was_trained_for_end_to_end_speedups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lossless prompts run every layer, so that drafts can't reach an end-to-end target."""
    model: Any = fresh("opt")
    solver = {"horizon": 4, "prompt": "max", "lengths": [[4, 1]], "prompt_lengths": [[24, 1]], "over": "all"}
    model.config.skipdecode = SkipConfig(solver=solver).to_dict()
    expected = resolve_plan(model, None, 1.5, over="decode", prompts=[24]).schedule
    assert resolve_plan(model, None, 1.5, prompts=[24]).schedule != expected, "otherwise both are alike"
    drafted: list[SkipSchedule] = []

    def note(*args: Any, **how: Any) -> Any:
        found = resolve_plan(*args, **how)
        drafted.append(found.schedule)
        return found

    for module in ("generate.skip_generate", "engine.engine", "timing.compare"):
        monkeypatch.setattr(f"skipdecode.{module}.resolve_plan", note)
    ids = torch.arange(6, 30)[None]
    request: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    model.generate(**request, custom_generate=skip_generate, lossless=True, speedup=1.5, eos_token_id=None)
    Decoder(model, None, 4, lossless=True).plan(1.5, prompts=[24])  # type: ignore[arg-type]
    with Engine(model) as engine:
        engine.submit(ids[0].tolist(), max_new_tokens=4, lossless=True, speedup=1.5, eos_token_id=None)
    assert drafted == [expected] * 3
    plain = Decoder(model, None, 4).plan(1.5, prompts=[24])  # type: ignore[arg-type]
    assert resolve_plan(model, None, 1.5, prompts=[24]).schedule == plain.schedule
