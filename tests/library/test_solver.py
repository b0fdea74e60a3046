"""The cost model counts everything that a step touches, and the solver reaches its target by this count."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_models import tiny_opt
from transformers import AutoConfig

from skipdecode import ConfigError, CostModel, Machine, MeasuredCost, SkipSchedule, load, measure_cost, solve_schedule
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.schedule.cost import Cost
from skipdecode.schedule.lengths import LengthsByPrompt
from skipdecode.schedule.solver import MAX_DECODE_RATIO, MAX_HORIZON_RATIO, TOLERANCE, OutOfReachError

OPT_1_3B = CostModel(
    num_layers=24,
    layer_parameters=50_358_272,
    head_parameters=102_957_056,
    other_parameters=4096,
    embedding_values=4096,
    cache_values=4096,
    value_bytes=2,
    stopped_share=2 * 2048 * 2048 / 50_358_272,
)


def test_the_sizes_of_opt_1_3b_are_computed_from_its_config() -> None:
    sizes = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "num_hidden_layers": 24, "ffn_dim": 8192}
    cost = CostModel.of(AutoConfig.for_model("opt", **sizes, num_attention_heads=32, dtype=torch.bfloat16))
    # Counted by hand: four projections and two feed-forward matrices with biases, two layer norms; the tied head.
    hidden, inner = 2048, 8192
    assert cost.layer_parameters == 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    assert cost.head_parameters == 50272 * hidden
    assert cost == OPT_1_3B  # stopped_share: keys and values are two of the projections, without their biases


def test_a_step_reads_layers_and_head_in_their_own_data_types() -> None:
    def read(weights: str) -> float:
        return OPT_1_3B.stored_as(weights).step_bytes(3, 64)

    more = OPT_1_3B.head_parameters * (8 - 4.5) / 8
    assert read("int4-int8-head") - read("int4") == pytest.approx(more)
    assert read("int8") - read("int8-int4-head") == pytest.approx(more)
    assert OPT_1_3B.stored_as("packed") == OPT_1_3B


@pytest.mark.parametrize("kind", ["opt", "opt-350m"])
def test_a_model_and_its_config_have_the_same_cost_which_counts_all_parameters(kind: str) -> None:
    model = tiny_opt(kind, 5)
    cost = CostModel.of(model)
    assert cost == CostModel.of(model.config)
    embeddings = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    counted = 5 * cost.layer_parameters + cost.other_parameters + embeddings  # the head is the embedding
    assert counted == sum(p.numel() for p in model.parameters())


@given(
    speedup=st.floats(1.01, 8.5),
    horizon=st.integers(1, 128),
    spread=st.floats(0, 1),
    batch=st.integers(1, 64),
    prompt=st.integers(1, 1000),
)
def test_a_solved_schedule_reaches_its_target_and_one_layer_more_does_not(
    speedup: float, horizon: int, spread: float, batch: int, prompt: int
) -> None:
    settings = {"horizon": horizon, "prompt_length": prompt, "batch_size": batch}
    floor = SkipSchedule(24, 1, 1, horizon=horizon)
    reachable = OPT_1_3B.at(prompt_length=prompt, batch_size=batch).speedup(floor)
    if speedup > reachable:
        with pytest.raises(ConfigError, match="reaches at most"):
            solve_schedule(OPT_1_3B, speedup, spread=spread, **settings)
        return
    schedule = solve_schedule(OPT_1_3B, speedup, spread=spread, **settings)
    predicted = OPT_1_3B.at(prompt_length=prompt, batch_size=batch).speedup(schedule)
    assert predicted >= speedup
    # One more layer misses the target.
    if schedule.max_layers < 24:
        slower = SkipSchedule(24, schedule.max_layers + 1, schedule.min_layers + 1, horizon=horizon)
        assert OPT_1_3B.at(prompt_length=prompt, batch_size=batch).speedup(slower) < speedup


def test_the_predicted_speedup_equals_the_sum_over_all_steps() -> None:
    schedule = SkipSchedule(24, 12, 4, horizon=10)
    machine = Machine(bytes_per_second=1e11, operations_per_second=1e13)
    batch, prompt = 4, 30

    def seconds(layers: int, context: int) -> float:
        weights = layers * 50_358_272 + 102_957_056 + 4096
        cached = layers * 4096 * (context + 1)
        read = 2 * (weights + batch * (4096 + cached)) / 1e11
        computed = 2 * batch * (weights + cached) / 1e13
        return max(read, computed)

    full = sum(seconds(24, prompt + i) for i in range(10))
    skipped = sum(seconds(schedule.budget(i), prompt + i) for i in range(10))
    predicted = OPT_1_3B.at(prompt_length=prompt, batch_size=batch, machine=machine).speedup(schedule)
    assert predicted == pytest.approx(full / skipped)


LENGTHS = st.lists(st.integers(2, 80), min_size=1, max_size=30)


@given(
    speedup=st.floats(1.01, 4),
    lengths=LENGTHS,
    batch=st.integers(1, 64),
    horizon=st.integers(1, 90),
    decay=st.sampled_from(["linear", "cosine", "power", "constant"]),
)
def test_with_known_lengths_the_horizon_is_as_long_as_the_target_allows(
    speedup: float, lengths: list[int], batch: int, horizon: int, decay: Any
) -> None:
    cost = OPT_1_3B.at(lengths=lengths, batch_size=batch)
    try:
        schedule = solve_schedule(cost, speedup, horizon=horizon, decay=decay)
    except ConfigError:
        assume(False)
    assert cost.speedup(schedule) >= speedup
    assert horizon <= schedule.horizon <= MAX_HORIZON_RATIO * horizon
    if schedule.max_layers > schedule.min_layers and schedule.horizon < MAX_HORIZON_RATIO * horizon:
        assert cost.speedup(replace(schedule, horizon=schedule.horizon + 1)) < speedup


@given(
    speedup=st.floats(1.01, 5),
    lengths=LENGTHS,
    prompts=st.integers(1, 1000),
    batch=st.integers(1, 64),
    prompt=st.sampled_from(["full", "max"]) | st.integers(1, 24),
    over=st.sampled_from(["decode", "all"]),
)
def test_with_known_lengths_the_target_is_reached_and_one_layer_more_misses_it(
    speedup: float, lengths: list[int], prompts: int, batch: int, prompt: Any, over: Any
) -> None:
    conditions = {"lengths": lengths, "prompt_length": prompts, "batch_size": batch}
    cost = OPT_1_3B.at(**conditions)
    fastest = SkipSchedule(24, 1, 1, prompt="max" if over == "all" else "full")
    reachable = cost.speedup(fastest, over=over)
    settings: Any = {"prompt": prompt, "over": over, "spread": 0.0}
    if speedup > reachable:
        with pytest.raises(ConfigError, match="reaches at most"):
            solve_schedule(OPT_1_3B, speedup, **settings, **conditions)
        return
    schedule = solve_schedule(OPT_1_3B, speedup, **settings, **conditions)
    assert cost.speedup(schedule, over=over) >= speedup
    prompt_layers = {"full": 24, "max": schedule.max_layers}.get(prompt, prompt)
    assert schedule.prompt_budget <= max(prompt_layers, schedule.max_layers)
    if over == "decode":
        assert schedule.prompt_budget == max(prompt_layers, schedule.max_layers)
    # One more layer for generated tokens, and for prompts where max_layers requires it, misses the target.
    if schedule.max_layers < 24:
        more = schedule.max_layers + 1, schedule.min_layers + 1
        wider = schedule.prompt if schedule.prompt == "full" else max(schedule.prompt_budget, more[0])
        assert cost.speedup(SkipSchedule(24, *more, prompt=wider), over=over) < speedup * (1 + TOLERANCE)
    # Prompts keep their layers unless decoding alone would have to be too fast.
    if over == "all" and schedule.prompt_budget > schedule.max_layers:
        assert schedule.prompt_budget == prompt_layers or cost.speedup(schedule) <= MAX_DECODE_RATIO * speedup
        wider = solve_schedule(OPT_1_3B, speedup, **{**settings, "prompt": schedule.prompt_budget}, **conditions)
        assert wider.prompt_budget == schedule.prompt_budget


@pytest.mark.parametrize(("batch", "prompt", "layers"), [(1, 64, 24), (8, 64, 24), (8, 400, 15), (32, 1500, 9)])
def test_for_an_end_to_end_target_long_prompts_run_fewer_layers_and_short_ones_all(
    batch: int, prompt: int, layers: int
) -> None:
    schedule = solve_schedule(OPT_1_3B, 3, over="all", prompt_length=prompt, batch_size=batch, lengths=[48])
    assert schedule.prompt_budget == layers


def test_the_predicted_prefill_time_equals_a_count_by_hand() -> None:
    machine = Machine(bytes_per_second=1e11, operations_per_second=1e12)
    cost = OPT_1_3B.at(prompt_length=30, batch_size=4, machine=machine)
    weights = 10 * 50_358_272
    attended = 10 * 4096 * sum(range(1, 31))
    computed = 2 * 4 * (30 * weights + attended + 102_957_056 + 4096) / 1e12
    assert cost.prefill_seconds(10) == pytest.approx(computed)
    read = 2 * (weights + 102_957_056 + 4096 + 4 * 30 * (4096 + 10 * 4096)) / 1e9
    slow = OPT_1_3B.at(prompt_length=30, batch_size=4, machine=Machine(1e9, 1e15))
    assert slow.prefill_seconds(10) == pytest.approx(read)
    on_cpu = OPT_1_3B.at(prompt_length=30, batch_size=4, machine="cpu")
    assert on_cpu.prefill_seconds(10) == pytest.approx(computed * 1e12 / 3.7e11), "bound by arithmetic"
    with pytest.raises(ConfigError, match="unknown machine 'abacus'"):
        OPT_1_3B.at(machine="abacus")
    schedule = SkipSchedule(24, 6, 2, horizon=9, prompt=10)
    full = SkipSchedule.full_depth(24, horizon=9)
    whole = (cost.prefill_seconds(24) + cost.decode_seconds(full)) / (computed + cost.decode_seconds(schedule))
    assert cost.speedup(schedule, over="all") == pytest.approx(whole)


def test_the_predicted_prefill_time_with_prompt_stop_equals_a_count_by_hand() -> None:
    """Above prompt_stop, all tokens compute keys and values only, and the last token of each prompt runs fully."""
    cost = OPT_1_3B.at(prompt_length=30, batch_size=4, machine=Machine(1e11, 1e12))
    schedule = SkipSchedule(24, 6, 2, horizon=9, prompt_stop=10)
    share = 2 * 2048 * 2048 / 50_358_272
    above = share * (cost.prefill_seconds(24) - cost.prefill_seconds(10))
    last = cost.step_seconds(24, 0) - cost.step_seconds(10, 0)
    assert cost.prompt_seconds(schedule) == pytest.approx(cost.prefill_seconds(10) + above + last)
    full = SkipSchedule.full_depth(24, horizon=9)
    whole = cost.prefill_seconds(24) + cost.decode_seconds(full)
    skipped = cost.prompt_seconds(schedule) + cost.decode_seconds(schedule)
    assert cost.speedup(schedule, over="all") == pytest.approx(whole / skipped)
    # Prompts that run fewer layers than prompt_stop.
    assert cost.prompt_seconds(replace(schedule, prompt="max")) == cost.prefill_seconds(6)


@pytest.mark.parametrize("speedup", [1.2, 1.5, 2, 4])
def test_prompt_stop_leaves_more_layers_to_generated_tokens_at_the_same_speedup(speedup: float) -> None:
    long: Any = {"over": "all", "prompt_length": 1500, "batch_size": 8, "horizon": 48}
    stopped = solve_schedule(OPT_1_3B, speedup, prompt_stop=6, **long)
    whole = solve_schedule(OPT_1_3B, speedup, **long)
    cost = OPT_1_3B.at(prompt_length=1500, batch_size=8)
    assert cost.speedup(stopped, over="all") >= speedup
    assert stopped.prompt_stop == 6
    assert stopped.mean_budget(48) >= whole.mean_budget(48)
    assert speedup == 4 or stopped.mean_budget(48) > whole.mean_budget(48)


def test_full_depth_ignores_prompt_stop_which_must_lie_between_warmup_layers_and_num_layers() -> None:
    assert solve_schedule(OPT_1_3B, 1, prompt_stop=6).prompt_stop is None
    with pytest.raises(ConfigError, match=r"prompt_stop is 25: it must lie between warmup_layers \(1\) and num_layers"):
        solve_schedule(OPT_1_3B, 2, prompt_stop=25)
    with pytest.raises(ConfigError, match=r"prompt_stop is 1: it must lie between warmup_layers \(2\)"):
        solve_schedule(OPT_1_3B, 2, warmup_layers=2, prompt_stop=1)
    with pytest.raises(ConfigError, match="prompt_stop"):
        SkipSchedule(6, 3, 2, prompt_stop=True)


def test_a_cost_without_prefill_times_refuses_end_to_end_targets() -> None:
    with pytest.raises(ConfigError, match="over is 'all': this cost doesn't include the time of the prefill"):
        solve_schedule(MeasuredCost(24, {1: 2.0, 24: 25.0}), 2, over="all")
    with pytest.raises(ConfigError, match="unknown over 'whole'"):
        solve_schedule(OPT_1_3B, 2, over="whole")  # type: ignore[arg-type]


def test_a_checkpoint_with_sequence_lengths_solves_its_schedule_for_the_given_batch() -> None:
    texts, prompts = [[12, 5], [30, 5], [60, 1]], [[40, 9]]
    solver = {"horizon": 40, "batch_size": 8, "lengths": texts, "prompt_lengths": prompts}
    trained = solve_schedule(OPT_1_3B, 3, **solver)
    both = {3.0: trained, **{speedup: solve_schedule(OPT_1_3B, speedup, **solver) for speedup in (1.5, 2.0, 4.0)}}
    config = SkipConfig.from_dict(SkipConfig(schedules=both, solver=solver).to_dict())
    assert config.plan_for(OPT_1_3B, 3).schedule == trained
    assert config.plan_for(OPT_1_3B, 3, prompts=[[70] * 8]).schedule == trained
    alone = config.plan_for(OPT_1_3B, 3, prompts=[[70] * 1]).schedule
    assert alone == solve_schedule(OPT_1_3B, 3, **{**solver, "batch_size": 1})
    behind = config.plan_for(OPT_1_3B, 3, over="all", prompts=[[1000] * 8]).schedule
    assert behind == solve_schedule(OPT_1_3B, 3, over="all", **solver, prompt_length=1024)
    whole = config.plan_for(OPT_1_3B, 3, over="all", prompts=[[40] * 8]).schedule
    assert whole == solve_schedule(OPT_1_3B, 3, **solver, over="all")
    assert len({trained, alone, behind}) == 3, "the conditions matter here"
    # Checkpoints of earlier versions have no sequence lengths: they decode as they were trained.
    earlier = SkipConfig(schedules=both, solver={"horizon": 40, "batch_size": 8})
    assert earlier.plan_for(OPT_1_3B, 3, prompts=[[1100] * 1]).schedule == trained
    # A model trained with a single schedule besides full depth always decodes with it, except for another `over`.
    full = SkipSchedule.full_depth(24)
    for schedules in ({3.0: trained}, {1.0: full, 3.0: trained}):
        single = SkipConfig(schedules=schedules, solver=solver)
        assert single.plan_for(OPT_1_3B, 3, prompts=[[70] * 1]).schedule == trained
        assert single.plan_for(OPT_1_3B, 3, over="all", prompts=[[1000] * 8]).schedule == behind


def test_a_checkpoint_with_lengths_by_prompt_solves_its_schedule_for_the_given_prompts() -> None:
    solver = {"horizon": 40, "lengths": [[30, 1]], "prompt_lengths": [[40, 1]]}
    texts = LengthsByPrompt.of([(n, n) for n in range(20, 61)])
    trained = solve_schedule(OPT_1_3B, 3, **solver)
    both = {3.0: trained, **{speedup: solve_schedule(OPT_1_3B, speedup, **solver) for speedup in (1.5, 2.0, 4.0)}}
    config = SkipConfig.from_dict(SkipConfig(schedules=both, solver=solver, lengths_by_prompt=texts).to_dict())
    assert config.plan_for(OPT_1_3B, 3).schedule == trained
    found = {}
    for batches in ([[20]], [[60]], [[20, 60]], [[60, 20]], [[20, 20]], [[20], [60]]):
        steps = texts.expected_steps(batches)
        cost = OPT_1_3B.at(prompt_length=40, batch_size=len(batches[0]), expected_steps=steps)
        found[str(batches)] = config.plan_for(OPT_1_3B, 3, prompts=batches).schedule
        assert found[str(batches)] == solve_schedule(cost, 3, horizon=40)
    assert found["[[20, 60]]"] == found["[[60, 20]]"]
    # Short sequences have to skip layers earlier.
    assert found["[[20]]"].mean_budget(20) < found["[[60]]"].mean_budget(20)
    # Prompts with completions of one token have no decode step: the lengths of training are used instead.
    at_once = SkipConfig(solver=solver, lengths_by_prompt=LengthsByPrompt.of([(20, 1), (60, 9)], groups=2))
    assert at_once.plan_for(OPT_1_3B, 3, prompts=[[20]]).schedule == trained


@given(
    st.sets(st.integers(1, 12), min_size=1),
    st.sampled_from(["linear", "constant"]),
    st.sampled_from(["full", "max"]),
    st.sampled_from(["decode", "all"]),
    st.floats(1.01, 6),
)
def test_with_budgets_a_schedule_runs_only_those_and_is_as_near_to_the_target_as_any(
    budgets: set[int], decay: Any, prompt: Any, over: Any, target: float
) -> None:
    cost = MeasuredCost(12, {1: 2.0, 12: 13.0}, prefill={1: 2.0, 12: 24.0})
    budgets.add(12)  # full depth is always allowed

    def layers(schedule: SkipSchedule) -> set[int]:
        return {schedule.prompt_budget, *(schedule.budget(i) for i in range(9))}

    allowed = []
    for low, high, fill in itertools.product(range(1, 13), range(1, 13), [prompt, *range(1, 13)]):
        if low > high or (decay == "constant" and low < high) or (fill != prompt and (over == "decode" or fill < high)):
            continue
        each = SkipSchedule(12, high, low, horizon=8, decay=decay, prompt=fill)
        # All numbers in between count, whether or not a horizon of eight tokens meets them.
        if layers(each) <= budgets and set(range(low, high + 1)) <= budgets:
            allowed.append(cost.speedup(each, over=over))
    how: Any = {"horizon": 8, "decay": decay, "prompt": prompt, "over": over, "budgets": budgets}
    if target > max(allowed):
        with pytest.raises(OutOfReachError):
            solve_schedule(cost, target, **how)
        return
    found = solve_schedule(cost, target, **how)
    assert layers(found) <= budgets
    assert cost.speedup(found, over=over) >= target
    if over == "decode":
        aim = min(target * cost.margin, max(allowed))
        assert cost.speedup(found) <= min(speedup for speedup in allowed if speedup >= aim) * (1 + TOLERANCE)


def test_a_checkpoint_of_few_depths_keeps_to_them_in_other_batches() -> None:
    """Solved anew, 3x of a batch of 32 would run layers that no training step ran."""
    solver = {"decay": "constant", "prompt": "max", "horizon": 40, "over": "all"}
    schedules = {speedup: solve_schedule(OPT_1_3B, speedup, **solver) for speedup in (1, 2, 3, 4)}
    lengths = LengthsByPrompt.of([(n, n) for n in range(20, 61)])
    config = SkipConfig(schedules, solver, lengths_by_prompt=lengths)
    trained = {schedule.max_layers for schedule in schedules.values()}
    batch = [[40] * 32]
    untrained = solve_schedule(config.cost_for(OPT_1_3B, prompts=batch), 2.5, **solver)
    assert untrained.max_layers not in trained  # else this test shows nothing
    plan = config.plan_for(OPT_1_3B, 2.5, prompts=batch)
    assert plan.reached
    assert plan.schedule.max_layers in trained


def test_a_checkpoint_stores_every_digit_of_its_speedups() -> None:
    schedule = SkipSchedule(24, 12, 3)
    schedules = dict.fromkeys((1.0, 1.0000001, 4 / 3, 1234567.0), schedule)
    values = SkipConfig(schedules).to_dict()
    assert SkipConfig.from_dict(values).schedules == schedules
    assert next(iter(values["schedules"])) == "1"
    rounded = {**values, "schedules": {"1.33333": schedule.to_dict()}}  # as earlier versions wrote them
    assert SkipConfig.from_dict(rounded).schedules == {1.33333: schedule}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": None}, "task is 'None': expected a mapping of names to values"),
        ({"solver": []}, "solver is '.*': expected a mapping of names to values"),
        ({"solver": {"horizont": 3}}, "unknown solver setting 'horizont': did you mean 'horizon'"),
        ({"solver": {"machine": "abacus"}}, "unknown machine 'abacus'"),
        ({"solver": {"horizon": "x"}}, "horizon is 'x': it must be an integer of at least 1"),
        ({"solver": {"prompt_length": None}}, "prompt_length is None: it must be"),
        ({"solver": {"lengths": [[3, 1], [2, 1]]}}, "lengths are"),
        ({"texts": [[9, [[3, 1]]], [4, [[3, 1]]]]}, "prompt groups have lengths of"),
        ({"schedules": []}, "is damaged"),
        *(
            ({"schedules": {speedup: SkipSchedule(24, 12, 3).to_dict()}}, "speedup is .*: it must be a number of at")
            for speedup in ("nan", "inf", "0.5", "-3")
        ),
    ],
)
def test_an_invalid_section_of_a_checkpoints_config_is_named(change: dict[str, Any], message: str) -> None:
    values = SkipConfig(solver={"horizon": 8, "prompt_length": 16, "batch_size": 2}).to_dict()
    assert SkipConfig.from_dict(values).horizon == 8
    with pytest.raises(ConfigError, match=f"skipdecode.* {message}"):
        SkipConfig.from_dict({**values, **change})


@given(speedup=st.floats(1.01, 8.5), horizon=st.integers(1, 128), spread=st.floats(0, 1))
def test_constant_decay_keeps_one_budget_the_largest_that_reaches_the_target(
    speedup: float, horizon: int, spread: float
) -> None:
    schedule = solve_schedule(OPT_1_3B, speedup, horizon=horizon, spread=spread, decay="constant")
    layers = schedule.max_layers
    assert schedule.min_layers == layers
    assert OPT_1_3B.at().speedup(schedule) >= speedup
    if layers < 24:
        assert OPT_1_3B.at().speedup(SkipSchedule(24, layers + 1, layers + 1, horizon=horizon)) < speedup


def test_zero_decode_steps_take_no_time_and_have_no_decoding_speedup() -> None:
    cost, schedule = OPT_1_3B.at(), SkipSchedule(24, 8, 4, prompt="max")
    assert cost.decode_seconds(schedule, 0) == 0
    with pytest.raises(ConfigError, match="steps is 0: there is no decode step"):
        cost.speedup(schedule, 0)
    full, fast = (cost.prompt_seconds(each) for each in (SkipSchedule.full_depth(24), schedule))
    assert cost.speedup(schedule, 0, over="all") == pytest.approx(full / fast)


def test_a_target_of_one_gives_full_depth() -> None:
    assert solve_schedule(OPT_1_3B, 1, horizon=9) == SkipSchedule.full_depth(24, horizon=9)


def test_the_refusal_of_an_unreachable_target_names_the_largest_reachable_one() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_schedule(OPT_1_3B, 50)
    found = re.search(r"reaches at most ([\d.]+)", str(caught.value))
    assert found
    assert solve_schedule(OPT_1_3B, float(found[1])).max_layers == 1
    with pytest.raises(ConfigError, match="reaches at most"):
        solve_schedule(OPT_1_3B, float(found[1]) + 0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speedup": 0.5}, "speedup is 0.5"),
        ({"speedup": float("nan")}, "speedup is nan"),
        ({"speedup": 2, "spread": 1.5}, "spread is 1.5"),
        ({"speedup": 2, "spread": "x"}, "spread is 'x'"),
        ({"speedup": 2, "prompt": 0}, "prompt is 0: it must be an integer of at least 1"),
        ({"speedup": 2, "prompt": True}, "prompt is True: it must be an integer of at least 1"),
        ({"speedup": 2, "prompt": 25}, "prompt is 25: it must lie between max_layers"),
        ({"speedup": 2, "prompt": "some", "over": "all"}, "unknown prompt 'some'"),
        ({"speedup": 2, "decay": "linaer"}, "did you mean 'linear'"),
        ({"speedup": 2, "batch_size": 1.5}, "batch_size is 1.5: it must be an integer of at least 1"),
        ({"speedup": 2, "prompt_length": "64"}, "prompt_length is '64': it must be an integer of at least 1"),
        ({"speedup": 2, "warmup_layers": 99}, r"warmup_layers is 99: it must lie between 1 and num_layers \(24\)"),
    ],
)
def test_an_invalid_argument_of_solve_schedule_is_refused_by_its_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        solve_schedule(OPT_1_3B, **change)  # type: ignore[arg-type]


CURVED = {"horizon": 34, "warmup_layers": 2, "decay": "cosine", "spread": 0.2, "prompt_length": 300, "batch_size": 1}
FIXED = {"horizon": 60, "decay": "constant", "placement": "bottom", "prompt_length": 64, "batch_size": 32}
LATE = {"horizon": 128, "decay": "power", "decay_rate": 4.0, "spread": 0.9, "prompt_length": 500, "batch_size": 256}


@pytest.mark.parametrize(
    ("solver", "expected"),
    [
        ({}, [(22, 8), (13, 4), (6, 2)]),
        (CURVED, [(18, 12), (10, 7), (5, 4)]),
        (FIXED, [(15, 15), (9, 9), (4, 4)]),
        (LATE, [(20, 1), (12, 2), (7, 1)]),
    ],
)
def test_stored_solver_settings_give_the_same_schedules_as_in_earlier_versions(
    solver: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    """The expected layers were solved by an earlier version."""
    config = SkipConfig.from_dict(SkipConfig(solver=solver).to_dict())
    for speedup, layers in zip((1.5, 2.4, 4), expected, strict=True):
        schedule = config.plan_for(OPT_1_3B, speedup).schedule
        assert (schedule.max_layers, schedule.min_layers) == layers
        assert schedule == solve_schedule(OPT_1_3B, speedup, **solver)
        assert schedule == config.plan_for(OPT_1_3B.at(**config.conditions), speedup).schedule
        kept = ("horizon", "warmup_layers", "decay", "decay_rate", "placement")
        assert all(getattr(schedule, name) == solver[name] for name in kept if name in solver)


def test_a_measured_cost_replaces_the_conditions_of_a_checkpoint() -> None:
    cost = MeasuredCost(24, {1: 2.0, 24: 25.0})
    settings = {"horizon": 20, "spread": 0.1}
    config = SkipConfig(solver={**settings, "prompt_length": 300, "batch_size": 8})
    assert config.plan_for(cost, 3).schedule == solve_schedule(cost, 3, **settings)


@pytest.mark.parametrize(
    ("cost", "change", "message"),
    [
        (OPT_1_3B.at(batch_size=8), {"batch_size": 8}, "batch_size is 8, but the given PredictedCost has its own"),
        (OPT_1_3B.at(), {"machine": Machine()}, "machine is Machine.*, but the given PredictedCost"),
        (MeasuredCost(2, {1: 1.0, 2: 2.0}), {"prompt_length": 9}, "prompt_length is 9, but the given MeasuredCost"),
        (OPT_1_3B, {"dtype": torch.float32}, "dtype is torch.float32, but the given CostModel"),
    ],
)
def test_a_condition_given_together_with_a_cost_that_has_its_own_is_refused(
    cost: Cost | CostModel, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        solve_schedule(cost, 1.5, **change)  # type: ignore[arg-type]
    solve_schedule(cost, 1.5)


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"prompt_length": -1}, {"repeats": True}])
def test_measure_cost_refuses_counts_below_one(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} is .*: it must be an integer of at least 1"):
        measure_cost(tiny_opt("opt", 2), **change)  # type: ignore[arg-type]


def test_load_refuses_an_empty_name() -> None:
    for name in (None, "", 5):
        with pytest.raises(ConfigError, match="the checkpoint's name is"):
            load(name)  # type: ignore[arg-type]
