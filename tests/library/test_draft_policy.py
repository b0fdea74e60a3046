"""How much is drafted: nearly as much as pays best, and little where it doesn't pay."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from lean_cases import SCHEDULES, fresh, generate

from skipdecode import ConfigError, CostModel, Engine, SkipSchedule, skip_generate
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.draft_policy import MAX_DRAFTS, CostDraftPolicy, VerifiedRound
from skipdecode.generate.draft_record import DraftRecord, optimistic_rejection_rates
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.pass_seconds import pass_seconds
from skipdecode.generate.skip_generate import choose_draft, resolve_plan
from skipdecode.kernels.cpu import kernels
from skipdecode.schedule.machine_profile import Profile, TimedBatch
from skipdecode.timing.compare import Decoder

LAYERS = 12


def speed(
    taken: float,
    draft: int,
    column: float,
    tokens: int,
    record: DraftRecord,
    rows: int = 1,
    between: float | None = None,
    expected: float = 1.0,
    first: float = 0.0,
) -> float:
    """Times that a text is faster than at full depth: a draft runs so many layers and is taken with one probability.

    `column` is what another column of a verification costs, in steps, and the first one `first` more. With `between`,
    rounds are timed, and each with drafts takes so much more than its passes; `expected` times what drafts and columns
    cost is expected of them.
    """

    def seconds(layers: int, passed: int) -> float:
        return layers / LAYERS + column * (passed - 1) + first * (layers == LAYERS and passed > rows)

    def guessed(layers: int, passed: int) -> float:
        return (
            seconds(layers, passed)
            if layers == LAYERS and passed == rows
            else (expected * layers / LAYERS if layers < LAYERS else 1 + first) + expected * column * (passed - 1)
        )

    length = CostDraftPolicy(record, guessed, LAYERS)
    cost = given = 0.0
    while given < tokens * rows:
        if between is not None and not length.has_pace:
            length.learn_pace(rows, 4, 4 * seconds(LAYERS, rows))
            cost += 4 * seconds(LAYERS, rows)
            given += 4 * rows
            continue
        rule = length.rule(rows, [draft] * MAX_DRAFTS)
        drafts, reach, took = [0] * rows, [1.0] * rows, 0.0
        for least in rule.worth:
            drafting = [row for row in range(rows) if drafts[row] == max(drafts) and reach[row] > least]
            took += seconds(draft, len(drafting)) if drafting else 0.0
            for row in drafting:
                drafts[row] += 1
                reach[row] *= rule.share(0.8)
        took += seconds(LAYERS, rows + sum(drafts)) + (between or 0.0) * any(drafts)
        accepted = [[*(random.random() < taken for _ in range(count)), False].index(False) for count in drafts]
        new = rows + sum(accepted)
        probabilities = [[0.8] * count for count in drafts]
        length.learn(VerifiedRound(rows, new, drafts, accepted, probabilities, None if between is None else took))
        cost += took
        given += new
    return given / rows * seconds(LAYERS, rows) / cost


def best_speed(taken: float, draft: int, column: float, rows: int, between: float = 0.0, first: float = 0.0) -> float:
    """That of the best number of drafts, always the same."""
    step, best = 1 + column * (rows - 1), 1.0
    for drafts in range(1, MAX_DRAFTS + 1):
        given = sum(taken**n for n in range(drafts + 1))
        whole = (
            drafts * (draft / LAYERS + column * (rows - 1)) + 1 + column * (rows * (drafts + 1) - 1) + between + first
        )
        best = max(best, given * step / whole)
    return best


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("draft", "column"), [(2, 0.02), (4, 0.1), (6, 0.05)])
@pytest.mark.parametrize("taken", [0, 0.3, 0.6, 0.85, 0.95, 1])
def test_the_speed_is_near_the_best_and_hardly_ever_below_full_depths(
    taken: float, draft: int, column: float, rows: int
) -> None:
    random.seed(1)
    assert speed(taken, draft, column, 2000, DraftRecord(), rows) > 0.94 * best_speed(taken, draft, column, rows)
    assert all(speed(0, draft, column, 32, DraftRecord(), rows) > 0.94 for _ in range(9))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("first", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("taken", [0, 0.6, 0.85, 0.95, 0.98])
def test_it_is_where_the_first_column_costs_more_than_the_next_ones(taken: float, first: float, rows: int) -> None:
    random.seed(1)
    best = best_speed(taken, 2, 0.02, rows, first=first)
    assert speed(taken, 2, 0.02, 4000, DraftRecord(), rows, first=first) > 0.9 * best


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("between", [0, 0.3, 0.6])
@pytest.mark.parametrize("taken", [0, 0.3, 0.6, 0.85, 0.95])
def test_what_the_clock_says_counts_where_rounds_take_longer_than_their_passes(
    taken: float, between: float, rows: int
) -> None:
    random.seed(1)
    best = best_speed(taken, 3, 0.03, rows, between)
    assert speed(taken, 3, 0.03, 4000, DraftRecord(), rows, between) > 0.9 * best
    assert speed(taken, 3, 0.03, 4000, DraftRecord(), rows, 4 * between) > 0.97, "whatever comes between"


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("expected", [0.5, 1.5, 2.5])
@pytest.mark.parametrize("taken", [0.6, 0.85, 0.95, 1])
def test_what_the_clock_says_counts_where_passes_are_cheaper_or_dearer_than_expected(
    taken: float, expected: float, rows: int
) -> None:
    random.seed(1)
    best = best_speed(taken, 3, 0.05, rows)
    found = speed(taken, 3, 0.05, 4000, DraftRecord(), rows, between=0, expected=expected)
    assert found > 0.97
    assert found > 0.7 * best


def test_a_round_that_the_machine_interrupted_does_not_end_drafting() -> None:
    record = DraftRecord()
    length = CostDraftPolicy(record, lambda layers, tokens: layers / LAYERS, LAYERS)
    length.learn_pace(1, 16, 16.0)
    for seconds in [1.5] * 20 + [500.0] + [1.5] * 20:
        count = len(length.rule(1, [3] * MAX_DRAFTS).worth)
        length.learn(VerifiedRound(1, 1 + count, [count], [count], [[0.95] * count], seconds))
    assert count > 3


def test_full_depths_pace_is_taken_anew_after_a_while() -> None:
    length = CostDraftPolicy(DraftRecord(), lambda layers, tokens: layers / LAYERS, LAYERS)
    assert not length.has_pace
    length.learn_pace(1, 16, 16.0)
    rounds = 0
    while length.has_pace:
        count = len(length.rule(1, [3] * MAX_DRAFTS).worth)
        length.learn(VerifiedRound(1, 1 + count, [count], [count], [[0.95] * count], 1.5))
        rounds += 1
    assert rounds == 40


def test_after_drafts_that_never_pay_full_depth_runs_for_a_while_before_the_next_one() -> None:
    length = CostDraftPolicy(DraftRecord(), lambda layers, tokens: layers / LAYERS, LAYERS)
    tried: list[int] = []
    for step in range(200):
        drafted = not length.rests and len(length.rule(1, [3] * MAX_DRAFTS).worth) > 0
        if drafted:
            length.learn(VerifiedRound(1, 1, [1], [0], [[0.95]]))
            tried.append(step)
        else:
            length.learn_pace(1, 1, 1.0)
    assert tried[:4] == [0, 1, 2, 3], "a step's time may be lost at first, and each costs a quarter"
    assert all(after - before > 20 for before, after in pairwise(tried[3:]))


def test_an_unsure_draft_is_the_last() -> None:
    record = DraftRecord()
    for _ in range(100):
        record.add(0.2, False)
        record.add(0.95, True)
    length = CostDraftPolicy(record, lambda layers, tokens: layers / LAYERS, LAYERS)
    record.budget = 9
    rule = length.rule(2, [3] * MAX_DRAFTS)
    assert rule.worth[0] < 1
    assert (
        rule.share(0.2)
        == record.acceptance_rate(0.2)
        < rule.worth[1]
        < rule.share(0.95)
        == record.acceptance_rate(0.95)
    )


def test_passes_take_what_was_measured_and_beyond_it_what_that_and_bytes_say() -> None:
    sizes = CostModel.of(fresh("opt"))
    by_bytes = pass_seconds(sizes, None, 64)
    assert by_bytes(6, 8) > by_bytes(6, 1) > by_bytes(2, 1)
    batches = tuple(
        TimedBatch(rows, 64, 64, {1: 1.0 + rows, 6: 6.0 + rows}, {1: 1.0, 6: 2.0}, {1: 0.0, 6: 0.0}) for rows in (1, 8)
    )
    measured = pass_seconds(sizes, Profile({}, 6, batches, "today"), 64)
    assert [measured(6, 1), measured(6, 8), measured(6, 4)] == pytest.approx([7, 14, 10])
    assert measured(6, 16) == pytest.approx(14 * by_bytes(6, 16) / by_bytes(6, 8))
    dearer = TimedBatch(12, 64, 64, {1: 9.0, 6: 30.0}, {1: 1.0, 6: 2.0}, {1: 0.0, 6: 0.0})
    steep = pass_seconds(sizes, Profile({}, 6, (*batches, dearer), "today"), 64)
    assert steep(6, 16) == pytest.approx(30 + 4 * (30 - 14) / 4), "on the line through the last two"


@pytest.mark.skipif(kernels() is None, reason="else drafts are computed as full depth is")
def test_drafts_whose_weights_were_not_timed_cost_less_by_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("opt")
    sizes, solved = CostModel.of(model), fast_path(model).solved()
    by_bytes, fewer = (pass_seconds(sizes.stored_as(weights), None, 64) for weights in (None, "int8"))
    whole, drafts = solved.lossless_costs(model, "packed", "int8", 64)
    assert (whole(6, 1), drafts(2, 1)) == (by_bytes(6, 1), fewer(2, 1))
    timed = Profile({}, 6, (TimedBatch(1, 64, 64, {1: 1.0, 6: 6.0}, {1: 1.0, 6: 2.0}, {1: 0.0, 6: 0.0}),), "today")
    monkeypatch.setattr(solved, "profile", lambda model, weights: timed if weights == "packed" else None)
    whole, drafts = solved.lossless_costs(model, "packed", "int8", 64)
    assert whole(6, 1) == pytest.approx(6)
    assert drafts(2, 1) == pytest.approx(whole(2, 1) * fewer(2, 1) / by_bytes(2, 1))
    monkeypatch.setattr(solved, "profile", lambda model, weights: timed)
    assert solved.lossless_costs(model, "packed", "int8", 64)[1](2, 1) == pytest.approx(whole(2, 1))


def test_as_many_layers_draft_as_are_expected_to_give_the_most() -> None:
    model, prompts = fresh("opt"), [5, 7]
    with pytest.raises(ConfigError, match="lossless is True without a schedule or a speedup"):
        choose_draft(model, prompts)
    fastest = SkipSchedule(6, 3, 1, horizon=8)
    trained = {1.0: SkipSchedule.full_depth(6), 2.0: SkipSchedule(6, 5, 2, horizon=8), 3.0: fastest}
    model.config.skipdecode = SkipConfig(trained, solver={"horizon": 8}).to_dict()
    one, two = (replace(fastest, max_layers=n, min_layers=n) for n in (1, 2))
    fast = fast_path(model)
    weights = fast.decoder().weights
    assert choose_draft(model, prompts) != one, "of more layers twice as many are hoped to be taken"
    for candidate in fast_path(model).solved().draft_candidates():
        for _ in range(500):
            fast.draft_record(weights, candidate, do_sample=False).add(0.8, candidate == two)
    assert choose_draft(model, prompts) == two
    for _ in range(2000):
        fast.draft_record(weights, one, do_sample=False).add(0.8, True)
    assert choose_draft(model, prompts) == one
    sampled = choose_draft(model, prompts, do_sample=True)
    assert sampled != one, "a seed gives one text, whatever was decoded before"


def test_of_layers_that_have_hardly_drafted_it_is_hoped_that_they_do_better() -> None:
    assert optimistic_rejection_rates([None] * 4) == pytest.approx([0.2, 0.1, 0.05, 0.025])
    assert optimistic_rejection_rates([0.12, None, None, 0.02]) == pytest.approx([0.12, 0.06, 0.03, 0.02])
    assert optimistic_rejection_rates([None, None, 0.004, 0.02]) == pytest.approx([0.016, 0.008, 0.004, 0.02])
    assert optimistic_rejection_rates([0.9, 0.9, 0.9, 0.9]) == [0.9] * 4


def test_greedy_calls_learn_from_one_another_and_sampled_ones_start_anew() -> None:
    model = fresh("opt")
    fast = fast_path(model)
    weights = fast.decoder().weights
    request: dict[str, Any] = {"lossless": True, "max_new_tokens": 30}
    generate(model, [5], SCHEDULES[0], **request)
    kept = fast.draft_record(weights, SCHEDULES[0], do_sample=False)
    looked_at = fast.draft_record(weights, SCHEDULES[0], "logits", do_sample=False)
    assert not looked_at.pace, "what one kind of loop takes says nothing of another"
    generate(model, [5], SCHEDULES[0], **request, repetition_penalty=1.1)
    assert looked_at.pace
    assert kept.acceptance_rate() < 0.75 < DraftRecord().acceptance_rate()
    generate(model, [5], SCHEDULES[0], **{**request, "do_sample": True})
    assert fast.draft_record(weights, SCHEDULES[0], do_sample=False) is kept
    assert fast.draft_record(weights, SCHEDULES[0], do_sample=True).acceptance_rate() == DraftRecord().acceptance_rate()
    assert (
        fast.draft_record(weights, replace(SCHEDULES[0], horizon=9), do_sample=False).acceptance_rate()
        == DraftRecord().acceptance_rate()
    )


def test_a_speedup_of_drafts_is_of_decoding_also_where_the_model_was_trained_for_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lossless prompts run every layer, so that a target of the whole says nothing of them."""
    model: Any = fresh("opt")
    config = SkipConfig(
        solver={"horizon": 4, "prompt": "max", "lengths": [[4, 1]], "prompt_lengths": [[24, 1]], "over": "all"}
    )
    model.config.skipdecode = config.to_dict()
    expected = resolve_plan(model, None, 1.5, over="decode", prompts=[24]).schedule
    assert resolve_plan(model, None, 1.5, prompts=[24]).schedule != expected, "else the two can't be told apart"
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
    assert (
        resolve_plan(model, None, 1.5, prompts=[24]).schedule
        == Decoder(model, None, 4).plan(1.5, prompts=[24]).schedule
    )  # type: ignore[arg-type]
