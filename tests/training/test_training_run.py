"""Small training runs from recipe to evaluation."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_python import run_python
from rich.console import Console
from small_checkpoints import save_checkpoint
from small_runs import SMALL, metrics, train_small
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import eval.cli
import skipdecode.training.figures
import train.checkpoints
import train.cli
import train.trainer
from data import load_task
from data.rows import encode_task
from skipdecode import ConfigError, CostModel, SkipSchedule, skip_generate, skip_layers, solve_schedule
from skipdecode.checkpoint.loading import load, load_tokenizer
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate import remote_entry as hub
from skipdecode.schedule.lengths import Lengths, LengthsByPrompt
from skipdecode.training.collator import PromptCompletionCollator
from train.build import build_model, build_task
from train.finish import measure_lengths
from train.output import check_folder
from train.recipe import Recipe, load_recipe
from train.run import run


def trained_rows(run: Path, **options: int) -> Any:
    """The tokenised training rows of a run, whose task has these options."""
    task, tokenizer = load_task("departures", **options), AutoTokenizer.from_pretrained(run)
    return encode_task(task, tokenizer, max_prompt_tokens=96, max_completion_tokens=64).rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(tmp_path_factory.mktemp("run") / "finished", "train.max_steps=6")


def test_a_finished_run_is_a_checkpoint_that_plain_transformers_loads(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "recipe.yaml", "metrics.jsonl"):
        assert (finished / name).exists()
    assert not (finished / "unfinished").exists()
    example = load_task("departures", test_size=12).load("test")[0]
    inputs = tokenizer(example.prompt, return_tensors="pt")
    config = SkipConfig.load(finished)
    assert config is not None
    request = {"custom_generate": skip_generate, "schedule": config.schedules[4.0], "max_new_tokens": 5}
    output = model.generate(**inputs, **request, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]


def test_a_finished_checkpoint_has_a_default_speed_and_number_of_new_tokens(finished: Path) -> None:
    asked = GenerationConfig.from_pretrained(finished)
    assert asked.default_speedup == 2
    assert asked.max_new_tokens == load_task("departures").max_new_tokens
    model, tokenizer = load(str(finished))
    inputs = tokenizer("vehicle: ferry | to: Saltfern\n", return_tensors="pt")
    by_default = hub.generate(model=model, **inputs)
    assert torch.equal(by_default, model.generate(**inputs, custom_generate=skip_generate, speedup=2))


def test_a_checkpoint_saves_the_schedules_that_trained_it(finished: Path) -> None:
    config = SkipConfig.load(finished)
    assert config is not None
    assert set(config.schedules) == {1, 2, 3, 4}
    cost = CostModel.of(AutoModelForCausalLM.from_pretrained(finished))
    for speedup, schedule in config.schedules.items():
        assert config.plan_for(cost, speedup).schedule == schedule
        assert cost.at(**config.conditions).speedup(schedule) >= speedup
    rows = trained_rows(finished, train_size=60, validation_size=4, test_size=12)
    assert Lengths.read(config.solver["lengths"]) == Lengths.of(map(len, rows["completion_ids"]))
    assert Lengths.read(config.solver["prompt_lengths"]) == Lengths.of(map(len, rows["prompt_ids"]))
    assert config.plan_for(cost, 2.5).schedule.horizon >= config.solver["horizon"] == config.schedules[1.0].horizon
    assert config.lengths_by_prompt is not None
    # There are fewer rows than schedule.texts.
    assert sum(n for _, texts in config.lengths_by_prompt.groups for _, n in texts.counts) == len(rows)
    assert config.lengths_by_prompt.groups[-1][0] == max(map(len, rows["prompt_ids"]))
    assert load_recipe(str(finished / "recipe.yaml")).to_yaml() == (finished / "recipe.yaml").read_text()


@pytest.mark.parametrize("trained", [[1.0, 2.0], [2.0, 3.0], []], ids=str)
def test_output_lengths_are_measured_at_the_slowest_trained_speed(trained: list[float], tmp_path: Path) -> None:
    model, tokenizer = load(str(save_checkpoint(tmp_path / "random", 3)))
    with torch.no_grad():  # so that sequences end at different lengths
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 3
    model.save_pretrained(tmp_path / "random")
    prompts = [[5 + (n * step) % 60 for step in range(1, 3 + n % 40)] for n in range(150)]  # more than one batch
    schedules = {1.0: SkipSchedule.full_depth(3), 2.0: SkipSchedule(3, 2, 1, horizon=6), 3.0: SkipSchedule(3, 1, 1)}
    SkipConfig({speedup: schedules[speedup] for speedup in trained}).save(tmp_path / "random")
    asked: dict[str, Any] = {}
    if 1.0 not in trained and trained:  # full depth may generate noise if it wasn't trained
        asked = {"custom_generate": skip_generate, "schedule": schedules[2.0]}
    pairs = []
    for ids in prompts:
        text = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=30, **asked)[0, len(ids) :]
        pairs.append((len(ids), len(text)))
    assert len({length for _, length in pairs}) > 5, "otherwise a wrong order of the rows would not be detected"
    found = measure_lengths(tmp_path / "random", prompts, 30, Console(quiet=True))
    assert found == LengthsByPrompt.of(pairs)


def test_every_step_is_logged_with_its_share_of_computed_positions(finished: Path) -> None:
    lines = metrics(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line["loss"] > 0
        assert (line["layer_column_share"] == 1) == (line["speedup_target"] == 1)
        assert 0 < line["layer_column_share"] <= 1
        assert (line["layers_per_token"] == 8) == (line["speedup_target"] == 1)
        assert any(re.fullmatch(r"loss_layers_\d+_to_\d+", key) for key in line)
    assert len({line["speedup_target"] for line in lines}) > 1


def test_the_logged_speed_excludes_validation_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated clock: a step takes a second, and a validation batch and a checkpoint a hundred each."""
    clock = [0.0]

    def takes(owner: Any, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            clock[0] += seconds
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, timed)

    monkeypatch.setattr(skipdecode.training.figures, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    takes(train.trainer.SkipTrainer, "training_step", 1)
    takes(train.trainer.SkipTrainer, "prediction_step", 100)
    takes(train.checkpoints, "write_checksums", 100)
    overrides = ["train.max_steps=6", "train.save_steps=2", "train.logging_steps=3", "train.validate_rows=8"]
    folder = train_small(tmp_path / "run", *overrides, "data.options={train_size: 2, validation_size: 4, test_size: 4}")
    rows = trained_rows(folder, train_size=2, validation_size=4, test_size=4)
    assert len(rows) < 8, "every step must have all rows"
    tokens = sum(map(len, rows["completion_ids"])) * 8 / len(rows)  # tokens of a step, which repeats some rows
    for line in metrics(folder):
        assert line["tokens_per_second"] == pytest.approx(tokens, rel=0.3)


def test_the_logged_share_counts_the_layers_run_at_each_position_of_the_batch(tmp_path: Path) -> None:
    """One batch has all rows: the number of positions run, summed over layers, divided by all of them."""
    overrides = ["train.max_steps=1", "schedule.speedups=[3]", "train.per_device_batch_size=12"]
    folder = train_small(tmp_path / "one", *overrides, "data.options={train_size: 4, validation_size: 4, test_size: 4}")
    config = SkipConfig.load(folder)
    assert config is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = load_task("departures", train_size=4, validation_size=4, test_size=4).load("train")
    prompt = max(len(tokenizer(e.prompt)["input_ids"]) for e in examples)
    completion = max(len(tokenizer(t)["input_ids"]) + 1 for e in examples for t in e.targets)
    completion = min(completion, 64)  # the task's limit
    schedule = config.schedules[3.0]
    computed = sum(
        layer in (schedule.prompt_layers if position < prompt else schedule.layers_at(position - prompt))
        for layer in range(8)
        for position in range(prompt + completion)
    )
    assert metrics(folder)[0]["layer_column_share"] == pytest.approx(computed / (8 * (prompt + completion)))


def check_same_steps(mine: Path, reference: Path) -> None:
    """Check equal metrics in each step and validation, up to the order of float32 additions."""
    for file in ("metrics.jsonl", "validation.jsonl"):
        found, expected = (read_lines(folder / file) for folder in (mine, reference))
        assert len(found) == len(expected) > 0
        for line, other in zip(found, expected, strict=True):
            assert line.keys() == other.keys()
            for name in sorted(line.keys() - MACHINE, key=lambda name: name not in ("loss", "grad_norm")):
                close = 1e-4 if name == "grad_norm" else 1e-5
                assert line[name] == pytest.approx(other[name], rel=close), (file, line["step"], name)


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# Metrics that depend on the machine, or on the padding, which differs between the batches of processes.
MACHINE = {"tokens_per_second", "peak_memory_gib", "layer_column_share"}
MACHINE |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
# 21 rows of different lengths: 4 per step don't fill the last step of an epoch, nor 6 the last validation batch.
UNEVEN = ["data.options={train_size: 7, validation_size: 2, test_size: 4}", "train.validate_rows=6"]
# Several schedules in a step, with all parts of the loss.
EVERY_LOSS = ["schedule.sampling=sandwich", "optim.distillation=0.5", "optim.depth_weight_power=-1.0"]


def test_accumulated_gradients_give_the_same_step_as_one_large_batch(tmp_path: Path) -> None:
    common = [*UNEVEN, *EVERY_LOSS, "train.max_steps=4", "model.config.dropout=0.0", "schedule.texts=0"]
    whole = train_small(tmp_path / "whole", *common, "train.per_device_batch_size=4")
    halves = ["train.per_device_batch_size=2", "train.gradient_accumulation_steps=2"]
    parts = train_small(tmp_path / "parts", *common, *halves)
    check_same_steps(parts, whole)


def test_an_evaluation_writes_its_report_predictions_and_picture(finished: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(finished), "--task", "departures", "--speedup", "1", "2", "4"]
    assert eval.cli.main([*arguments, "--limit", "10", "--batch-size", "4", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "frontier.png" in printed
    report = json.loads((output / "report.json").read_text())
    assert [row["speedup_target"] for row in report["rows"]] == [1, 2, 4]
    keys = ["schedule", "mean_layers", "prefill_seconds", "decode_seconds"]
    config = SkipConfig.load(finished)
    assert config is not None
    cost = CostModel.of(AutoModelForCausalLM.from_pretrained(finished))
    tokenizer = AutoTokenizer.from_pretrained(finished)
    examples = load_task("departures", train_size=60, validation_size=4, test_size=12).load("test")[:10]
    prompts = sorted(len(tokenizer(example.prompt)["input_ids"]) for example in examples)
    batches = [prompts[:4], prompts[4:8]]  # schedules are solved for full batches, without the last two prompts
    for row in report["rows"]:
        assert all(key in row for key in [*keys, "wall_clock_speedup"])
        assert {"bleu", "rouge1", "rouge2", "rougeL"} <= set(row["scores"])
        solved = config.plan_for(cost, row["speedup_target"], prompts=batches).schedule
        assert SkipSchedule.from_dict(row["schedule"]) == solved
        assert row["decode_seconds"] > 0
        assert row["prefill_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["decode_seconds"])
    assert report["rows"][0]["wall_clock_speedup"] == 1
    assert report["rows"][0]["mean_layers"] == 8
    assert report["versions"]["torch"] == torch.__version__
    for speedup in ("1", "2", "4"):
        lines = [json.loads(t) for t in (output / "predictions" / f"{speedup}x.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == [e.id for e in examples]
        assert [line["references"] for line in lines] == [list(e.references) for e in examples]
        assert all(set(line) == {"id", "prompt", "prediction", "references"} for line in lines)
    assert (output / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "| 4x |" in (output / "report.md").read_text()
    # A second evaluation into the same folder is refused, and the report stays.
    before = (output / "report.json").read_bytes()
    assert eval.cli.main([*arguments, "--output", str(output)]) == 2
    assert "already holds a report" in capsys.readouterr().err
    assert (output / "report.json").read_bytes() == before


def test_an_evaluation_reports_int8_weights_and_calibrated_schedules(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(finished), "--speedup", "2", "--limit", "4", "--max-new-tokens", "8"]
    arguments += ["--batch-size", "4"]
    assert eval.cli.main([*arguments, "--weights", "int8", "--calibrate", "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    assert report["weights"] == "int8"
    assert "float32 with int8 weights" in (output / "report.md").read_text()
    full, fast = report["rows"]
    tokenizer = load_tokenizer(finished)
    longest = max(len(tokenizer(line["prompt"]).input_ids) for line in read_lines(output / "predictions" / "1x.jsonl"))
    width = json.loads((finished / "config.json").read_text())["hidden_size"]
    # keys and values, 4 rows, 8 layers, the prompt and 7 inputs, in float32
    assert full["cache_bytes"] == 2 * 4 * 8 * (longest + 7) * width * 4
    assert fast["cache_bytes"] < full["cache_bytes"]
    assert fast["mean_layers"] < 8


def test_an_output_folder_with_another_run_or_other_files_is_refused_and_unchanged(
    finished: Path, tmp_path: Path, capsys: Any
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in finished.iterdir()}
    assert train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={finished}", "train.max_steps=6"]) == 2
    assert "already holds a finished run" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in finished.iterdir()} == before

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={other}"]) == 2
    assert "isn't empty and holds no run" in capsys.readouterr().err
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]

    shutil.copy(finished / "recipe.yaml", other / "recipe.yaml")
    assert train.cli.main(["--recipe", "quickstart", *SMALL, f"output.dir={other}", "train.seed=9"]) == 2
    assert "unfinished run of another recipe" in capsys.readouterr().err


def test_a_folder_left_by_a_run_killed_at_its_start_is_accepted(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [])
    for name in (".lock", "recipe.yaml.partial", "recipe.yaml.1f0e22aa.partial"):
        (tmp_path / name).touch()
        check_folder(tmp_path, recipe)
    (tmp_path / "recipe.yaml.bak").touch()
    with pytest.raises(ConfigError, match="isn't empty and holds no run"):
        check_folder(tmp_path, recipe)


# There are 12 rows, all in each step.
ONE_BATCH = ["data.options={train_size: 4, validation_size: 4, test_size: 4}", "train.per_device_batch_size=12"]
ONE_BATCH += ["model.config.dropout=0.0"]


def first_outputs(recipe: Recipe) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The untrained model, its log-probabilities for the batch at full depth and at 3x, and the labels."""
    task = build_task(recipe)
    model, tokenizer = build_model(recipe, task.load("train"))
    rows = encode_task(task, tokenizer, max_prompt_tokens=96, max_completion_tokens=64).rows
    batch = PromptCompletionCollator(tokenizer.pad_token_id)(list(rows))
    prompt_columns, labels = batch.pop("prompt_columns"), batch.pop("labels")
    full = model(**batch).logits.log_softmax(-1)
    lengths = {"prompt_lengths": map(len, rows["prompt_ids"]), "lengths": map(len, rows["completion_ids"])}
    section = recipe.schedule
    asked = {"over": section.over, "prompt": section.prompt, "batch_size": section.batch_size}
    schedule = solve_schedule(model, 3, horizon=task.horizon, **asked, **lengths)
    with skip_layers(model, schedule, prompt_columns=prompt_columns):
        skipped = model(**batch).logits.log_softmax(-1)
    return model, full[:, :-1], skipped[:, :-1], labels[:, 1:]


def test_the_first_distillation_loss_is_the_divergence_from_the_models_own_full_depth(tmp_path: Path) -> None:
    """With distillation 1, the first loss is the divergence between the untrained model's two outputs."""
    changes = ["train.max_steps=2", "schedule.speedups=[3]", "optim.distillation=1.0", f"output.dir={tmp_path / 'run'}"]
    recipe = load_recipe("quickstart", [*SMALL, *ONE_BATCH, *changes])
    _, full, skipped, labels = first_outputs(recipe)
    divergence = (full.exp() * (full - skipped)).sum(-1)[labels >= 0].mean()
    first, second = metrics(run(recipe, "quickstart"))[:2]
    assert first["loss"] == pytest.approx(divergence.item(), rel=1e-3)
    assert second["loss"] != first["loss"]


def test_the_loss_of_a_sandwich_step_is_the_mean_over_its_schedules(tmp_path: Path) -> None:
    """Full depth learns the references, and the other schedule the output of full depth; computed in one graph."""
    changes = ["train.max_steps=1", "schedule.speedups=[1,3]", "schedule.sampling=sandwich", "optim.distillation=1.0"]
    recipe = load_recipe("quickstart", [*SMALL, *ONE_BATCH, *changes, f"output.dir={tmp_path / 'run'}"])
    model, full, skipped, labels = first_outputs(recipe)
    counted = labels >= 0
    right = full.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    taught = full.detach()
    divergence = (taught.exp() * (taught - skipped)).sum(-1)
    expected = (-right[counted].mean() + divergence[counted].mean()) / 2
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    (first,) = metrics(run(recipe, "quickstart"))
    assert first["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_unused_sampling_settings_of_the_base_model_are_omitted(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", 8, max_position_embeddings=256)
    file = base / "generation_config.json"
    idle = {"temperature": 0.6, "top_p": 0.9, "length_penalty": 0.5}  # without do_sample or num_beams
    # The Trainer also changes a pad token that differs from the tokenizer's.
    file.write_text(json.dumps({**json.loads(file.read_text()), **idle, "pad_token_id": 5}))
    start = ("model.shape=null", "model.config=null", f"model.name_or_path={base}")
    speeds = ["schedule.speedups=[1,2.1234567]", "schedule.default_speedup=2.1234567", "schedule.texts=0"]
    folder = train_small(tmp_path / "run", "train.max_steps=1", *speeds, *start)
    saved = json.loads((folder / "generation_config.json").read_text())
    assert not saved.keys() & idle.keys()
    assert saved["max_new_tokens"] == load_task("departures").max_new_tokens
    assert saved["default_speedup"] == 2.1234567, "all digits are kept"
    config = SkipConfig.load(folder)
    assert config is not None
    assert 2.1234567 in config.schedules


def test_a_local_checkpoint_is_fine_tuned_under_schedules_from_files(finished: Path, tmp_path: Path) -> None:
    """The model comes from a folder with its own tokenizer, and is then decoded under the same schedule file."""
    file = tmp_path / "own.json"
    file.write_text(SkipSchedule(8, 5, 2, horizon=12, placement="even", decay="cosine").to_json())
    changes = ["model.shape=null", "model.config=null", f"model.name_or_path={finished}", "schedule.speedups=null"]
    changes += [f"schedule.files=[{file}]", "train.max_steps=1", "train.gradient_checkpointing=true"]
    folder = train_small(tmp_path / "tuned", *changes)
    config = SkipConfig.load(folder)
    assert config is not None
    assert list(config.schedules.values()) == [SkipSchedule.load(file)]
    before = AutoModelForCausalLM.from_pretrained(finished).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) < 0.1  # one small step
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(folder), "--speedup", "1", "--schedule", str(file), "--limit", "3"]
    assert eval.cli.main([*arguments, "--max-new-tokens", "8", "--output", str(output)]) == 0
    rows = json.loads((output / "report.json").read_text())["rows"]
    assert SkipSchedule.from_dict(rows[1]["schedule"]) == SkipSchedule.load(file)


def test_two_processes_train_the_same_steps_as_one_with_twice_the_batch(tmp_path: Path, capsys: Any) -> None:
    """With gloo, beyond the end of an epoch whose rows don't fill its last step; then one process continues alone."""
    common = [*SMALL, *UNEVEN, *EVERY_LOSS, "model.config.dropout=0.0", "train.save_steps=4", "train.max_steps=8"]
    common += ["schedule.texts=0"]
    whole = [*common, "train.per_device_batch_size=4", f"output.dir={tmp_path / 'a'}"]
    alone = run(load_recipe("quickstart", whole), "a")
    both = tmp_path / "b"
    overrides = [*common, "train.per_device_batch_size=2", f"output.dir={both}"]
    log = tmp_path / "log.txt"
    status = run_python(["train.py", "--recipe", "quickstart", *overrides], log, processes=2)
    assert status == 0, log.read_text()[-2000:]
    check_same_steps(both, alone)
    check_same_weights(both, alone)

    shutil.rmtree(both / "checkpoint-8")  # the run was killed in the middle of the first epoch, which has 6 steps
    for name in ("config.json", "model.safetensors"):
        (both / name).unlink()
    left = {file: file.read_bytes() for file in both.rglob("*") if file.is_file()}
    assert train.cli.main(["--recipe", "quickstart", *overrides]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "checkpoint-4 was written with 4 rows per step, but now there are 2 (" in error
    assert "set train.gradient_accumulation_steps=2" in error
    assert {file: file.read_bytes() for file in both.rglob("*") if file.is_file()} == left
    run(load_recipe("quickstart", [*overrides, "train.gradient_accumulation_steps=2"]), "b")
    assert "continuing from" in capsys.readouterr().err
    check_same_steps(both, alone)
    check_same_weights(both, alone)


def check_same_weights(mine: Path, reference: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(reference).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(mine).state_dict().items():
        # Adam moves a weight as far by a rounding error as by a gradient.
        torch.testing.assert_close(value, weights[name], atol=6e-3, rtol=0)


def test_real_e2e_runs_from_recipe_to_report(shared_data: Path, tmp_path: Path) -> None:
    small = [change for change in SMALL if not change.startswith("data.")]
    data = str(shared_data / "e2e")
    changes = [*small, "train.max_steps=2", f"data.path={data}", f"output.dir={tmp_path / 'run'}"]
    folder = run(load_recipe("e2e-tiny", changes), "e2e-tiny")
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(folder), "--task", "e2e", "--data-dir", data, "--limit", "5"]
    assert eval.cli.main([*arguments, "--max-new-tokens", "8", "--output", str(output)]) == 0
    lines = [json.loads(t) for t in (output / "predictions" / "1x.jsonl").read_text().splitlines()]
    assert lines[0]["prompt"].startswith("name: Xname")
    assert lines[0]["references"][0] == "A coffee shop in the city centre area called Blue Spice."
