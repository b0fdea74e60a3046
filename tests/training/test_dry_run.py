"""A dry run estimates the time and memory of a run, and leaves no trace."""

import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_runs
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

import train.cli
import train.dry_run.duration
import train.dry_run.rehearsal
from data.batches import ROW_COLUMNS
from skipdecode import SkipSchedule
from skipdecode.training.sampling import Draw, ScheduleSampler
from train.build import build_task
from train.data_order import DataOrder
from train.dry_run.duration import PlannedStep, choose_timed, estimate_seconds, plan_steps
from train.dry_run.rehearsal import dry_run
from train.prepare import make_arguments, prepare
from train.recipe import load_recipe
from train.run import run
from train.trainer import SkipTrainer

# With dropout, because a dry run must not change the run's random numbers.
SMALL = [*small_runs.SMALL, "model.config.dropout=0.1", "train.max_steps=3", "tracking.wandb=offline"]
SMALL += ["data.options={train_size: 20, validation_size: 4, test_size: 4}"]


def test_a_dry_run_prints_its_estimates_and_writes_nothing(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, folder = tmp_path / "temporary", tmp_path / "out"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    validation = ["train.validate_rows=4", "train.finish_with=best", "train.save_steps=1"]  # a dry run does without
    assert train.cli.main(["--recipe", "quickstart", *SMALL, *validation, f"output.dir={folder}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert not folder.exists()
    assert not list(temporary.iterdir())
    assert not Path("wandb").exists()
    for line in (
        r"parameters +2\d\d,\d{3}, of which 2\d\d,\d{3} are trained",
        r"rows +60",
        r"effective batch size +8 rows",
        r"steps +3",
        r"schedule +target 4x: (\d) to 1 of 8 layers over \d+ tokens, \1 for prompts, predicted speedup 4\.\d+x",
        r"largest batch +\d+ prompt tokens, \d+ completion tokens per row",
        r"memory, estimated +0\.\d\d GiB",
        r"  weights +0\.00 GiB",
        r"  gradients, activations +0\.\d\d GiB",
        r"seconds per step +\d+\.\d{3} at most; \d+\.\d{3} to \d+\.\d{3} on average",
        r"tokens per second +[\d,]+ of completions",
        r"training +0:00:\d\d to 0:0\d:\d\d \(h:mm:ss\), without checkpoints",
    ):
        assert re.search(f"^{line}", printed, re.MULTILINE), line


@pytest.fixture
def few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times a single step instead of sixteen, for tests that don't check the estimated time."""
    monkeypatch.setattr(train.dry_run.duration, "TIMED_STEPS", 1)
    monkeypatch.setattr(train.dry_run.rehearsal, "ROUNDS", 1)


@pytest.mark.usefixtures("few_timed_steps")
def test_the_largest_batch_has_the_longest_prompt_and_the_longest_completion(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*SMALL, f"output.dir={tmp_path / 'out'}"])
    found = dry_run(recipe)
    rows = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path)).encoded.rows
    longest = tuple(max(map(len, rows[name])) for name in ("prompt_ids", "completion_ids"))
    assert (found.prompt_columns, found.new_tokens) == longest
    recipe = load_recipe("quickstart", [*SMALL, "train.per_device_batch_size=1", f"output.dir={tmp_path / 'out'}"])
    single = dry_run(recipe)
    assert single.prompt_columns + single.new_tokens == max(rows["length"]) > longest[0]
    assert found.rows == 60


@pytest.mark.usefixtures("few_timed_steps")
def test_a_dry_run_predicts_the_number_of_steps_and_does_not_change_the_run_after_it(tmp_path: Path) -> None:
    changes = ["train.max_steps=null", "train.epochs=1.5", "train.gradient_accumulation_steps=3", "tracking.wandb=off"]
    changes += ["schedule.texts=0"]
    metrics, found = [], []
    for name in ("with", "without"):
        folder = tmp_path / name
        recipe = load_recipe("quickstart", [*SMALL, *changes, f"output.dir={folder}"])
        if name == "with":
            found.append(dry_run(recipe))
        run(recipe, name)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        metrics.append([(line["step"], line["loss"], line["grad_norm"], line["speedup_target"]) for line in lines])
    assert metrics[0] == metrics[1]
    assert found[0].rows_a_step == 24
    assert [step for step, *_ in metrics[0]] == list(range(1, found[0].steps + 1))


def test_a_dry_run_refuses_what_the_run_would_refuse(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for change, message in (
        (f"output.dir={tmp_path}", "isn't empty and holds no run"),
        ("schedule.speedups=[1,90]", "this model reaches at most"),
        ("publish.tag=v1", 'publish.tag is "v1" and publish.repository is null'),
        ("optim.learning_rte=1", "did you mean 'optim.learning_rate'"),
    ):
        assert train.cli.main(["--recipe", "quickstart", *SMALL, change, "--dry-run"]) == 2
        assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


SANDWICH = ["schedule.sampling=sandwich", "schedule.speedups=[1,2,4]"]


def naive_positions(draw: Draw, prompt_columns: int, new_tokens: int) -> int:
    """The number of positions that each layer runs under a schedule, summed over layers."""
    generated = sum(draw.schedule.budget(token) for token in range(new_tokens))
    return prompt_columns * len(draw.schedule.prompt_layers) + generated


@pytest.mark.parametrize(
    "changes",
    [
        ["train.epochs=2.0", "train.per_device_batch_size=16"],  # of 11.25 steps
        ["train.max_steps=10", "train.per_device_batch_size=2", "train.gradient_accumulation_steps=3", *SANDWICH],
        ["train.max_steps=20", "schedule.speedups=[2,4]", "optim.distillation=0.5", "train.per_device_batch_size=2"],
    ],
    ids=["epochs", "sandwich with gradient accumulation", "distillation"],
)
def test_the_estimated_time_is_the_time_that_the_run_takes(
    changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated clock advances by a constant, by the layers that run and by the logits."""
    clock = [0.0]
    step = SkipTrainer.training_step

    def timed(self: SkipTrainer, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        rows, positions = inputs["input_ids"].shape
        prompt, draws = inputs["prompt_columns"], self.sampler.at(self.state.global_step)
        passed = float(sum(naive_positions(draw, prompt, positions - prompt) for draw in draws))
        if self.objective.distillation and all(draw.schedule.skips for draw in draws):
            passed += 8 * positions / 3  # a forward pass at full depth
        clock[0] += 0.05 + 1e-4 * rows * passed + 1e-4 * rows * (positions - prompt) * len(draws)
        return step(self, model, inputs, num_items_in_batch)

    monkeypatch.setattr(SkipTrainer, "training_step", timed)
    monkeypatch.setattr(train.dry_run.rehearsal, "_now", lambda: clock[0])
    monkeypatch.setattr(train.dry_run.rehearsal, "ROUNDS", 1)  # a second round on this clock would measure the same
    long = ["data.options={train_size: 60, validation_size: 4, test_size: 4}", "train.max_steps=null"]
    quick = ["schedule.texts=0", "train.logging_steps=100", "train.save_steps=1000", "tracking.wandb=off"]
    recipe = load_recipe("quickstart", [*SMALL, *long, *quick, *changes, f"output.dir={tmp_path / 'out'}"])
    low, high = dry_run(recipe).seconds
    clock[0] = 0.0
    run(recipe, "run")
    assert low <= clock[0] <= high
    assert (low + high) / 2 == pytest.approx(clock[0], rel=0.04)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=40),
    batch=st.integers(1, 3),
    parts=st.integers(1, 3),
    processes=st.integers(1, 3),
    steps=st.integers(1, 30),
    distils=st.booleans(),
    teacher=st.sampled_from([None, "a frozen model"]),
)
def test_the_planned_work_of_a_step_is_that_of_its_slowest_process(
    lengths: list[tuple[int, int]],
    batch: int,
    parts: int,
    processes: int,
    steps: int,
    distils: bool,
    teacher: str | None,
) -> None:
    """Compared with accelerate's division of batches, and positions that are counted one by one."""
    rows = Dataset.from_dict({name: [[0] * each[n] for each in lengths] for n, name in enumerate(ROW_COLUMNS[:2])})
    skipping = (SkipSchedule(6, 5, 2, horizon=4), SkipSchedule(6, 3, 1, horizon=3, prompt="max"))
    sampler = ScheduleSampler((1.0, 2.0, 3.0), (SkipSchedule.full_depth(6), *skipping), (1.0, 1.0, 1.0), seed=3)
    arguments = SimpleNamespace(train_batch_size=batch, world_size=processes, seed=5)
    rows_a_step = batch * parts * processes
    encoded = SimpleNamespace(rows=rows)
    prepared: Any = SimpleNamespace(
        arguments=arguments, encoded=encoded, sampler=sampler, steps=steps, rows_a_step=rows_a_step, teacher=teacher
    )
    plan = plan_steps(prepared, distils)

    batches_of: list[list[list[int]]] = [[] for _ in range(processes)]
    order = DataOrder([sum(each) for each in lengths], rows_a_step, 5)
    for epoch in range(steps):  # at most one epoch per step
        order.epoch = epoch
        batches = BatchSampler(list(order), batch, drop_last=False)
        for process in range(processes):
            batches_of[process] += BatchSamplerShard(batches, processes, process)
    assert len(plan) == steps
    for step, planned in enumerate(plan):
        work = []
        for process in range(processes):
            work.append(0.0)
            for in_batch in batches_of[process][step * parts : (step + 1) * parts]:
                longest = max(lengths[row][0] for row in in_batch), max(lengths[row][1] for row in in_batch)
                passed = sum(naive_positions(draw, *longest) for draw in sampler.at(step))
                taught = distils and (teacher is not None or all(draw.schedule.skips for draw in sampler.at(step)))
                work[-1] += len(in_batch) * (passed / 6 + taught * sum(longest) / 3)
        assert planned.work == pytest.approx(max(work))
        assert planned.draws == sampler.at(step)
        taken = [row for n in range(parts) for process in batches_of for row in process[step * parts + n]]
        assert list(planned.rows) == taken


@settings(max_examples=50, deadline=None)
@given(work=st.lists(st.floats(1, 1e6), min_size=1, max_size=60), times=st.integers(1, 9), more=st.floats(0, 1e6))
def test_if_time_is_proportional_to_work_the_estimate_is_exact_up_to_its_margin(
    work: list[float], times: int, more: float
) -> None:
    plan = [PlannedStep((), (), each) for each in work]
    timed = choose_timed(plan, times * len(plan))
    found = estimate_seconds(timed, [[2 * each.step.work, 3 * each.step.work] for each in timed], more)
    whole = times * sum(work) + more
    assert found == (pytest.approx(0.9 * 2 * whole), pytest.approx(1.1 * 3 * whole))
