"""Runs with a layer order that is measured before training, and runs with a frozen teacher."""

import json
from pathlib import Path

import pytest
import torch
from small_runs import SMALL, metrics, train_small
from transformers import AutoModelForCausalLM, AutoTokenizer

import eval.cli
import train.layer_order
from skipdecode import ConfigError, skip_generate
from skipdecode.checkpoint.loading import load_model
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.training.layer_order import LayerOrder
from train.build import build_task
from train.prepare import make_arguments, prepare
from train.recipe import load_recipe
from train.run import run

DEPTH = 8
ORDERED = ("schedule.placement=order", "schedule.speedups=[1,2,3]", "schedule.decay=constant", "schedule.prompt=max")


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orders") / "auto"
    return train_small(folder, *ORDERED, "schedule.order=auto", "train.max_steps=4", "schedule.texts=0")


def test_a_measured_order_is_saved_with_the_run_and_used_by_its_schedules(ordered: Path) -> None:
    order = LayerOrder.load(ordered / "order.json").order
    assert sorted(order) == list(range(DEPTH))
    config = SkipConfig.load(ordered)
    assert config is not None
    assert config.solver["order"] == list(order)
    for speedup, schedule in config.schedules.items():
        assert schedule.order == order
        assert speedup == 1 or set(schedule.layers_at(0)) == set(order[: schedule.max_layers])


def test_a_checkpoint_with_a_layer_order_decodes_at_any_speed_also_with_its_own_code(ordered: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(ordered), AutoTokenizer.from_pretrained(ordered)
    inputs = tokenizer("vehicle: ferry | to: Saltfern\n", return_tensors="pt")
    for speedup in (2, 2.5):
        request = {**inputs, "speedup": speedup, "max_new_tokens": 6}
        expected = model.generate(**request, custom_generate=skip_generate)
        carried = model.generate(**request, custom_generate=str(ordered), trust_remote_code=True)
        assert torch.equal(carried, expected)


def test_a_resumed_run_keeps_its_layer_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    kept = LayerOrder((0, 7, 3, 5, 1, 2, 4, 6), {8: 0.0}, (0.0,) * 8, 1, 1, 0.1)
    changes = [*SMALL, *ORDERED, "schedule.order=auto", f"output.dir={tmp_path / 'run'}"]
    recipe = load_recipe("quickstart", changes)
    kept.save(tmp_path / "run" / "order.json")
    monkeypatch.setattr(train.layer_order, "find_order", None)  # nothing is measured
    prepared = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path / "run"))
    assert {schedule.order for schedule in prepared.sampler.schedules} == {kept.order}


@pytest.mark.parametrize("given", ["[0,2,1,3,4,5,6,7]", "FILE"])
def test_a_layer_order_may_be_a_list_or_a_file(given: str, tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text(json.dumps([0, 2, 1, 3, 4, 5, 6, 7]))
    given = given.replace("FILE", str(tmp_path / "order.json"))
    recipe = load_recipe("quickstart", [*SMALL, *ORDERED, f"schedule.order={given}", f"output.dir={tmp_path / 'run'}"])
    prepared = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path / "run"))
    assert {schedule.order for schedule in prepared.sampler.schedules} == {(0, 2, 1, 3, 4, 5, 6, 7)}
    assert prepared.layer_order is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["schedule.placement=order"], "schedule.placement is 'order' without schedule.order"),
        (["schedule.order=auto"], 'schedule.order is "auto" and schedule.placement is "top": '),
        (["model.layers=3", "model.keep=order"], "model.keep is 'order' without model.order"),
        (["model.layers=3", "model.order=[0,1]"], r"model\.order is \[0, 1\] and model\.keep is null: "),
        (["model.layers=3", "model.keep=order", "model.order=auto"], "model.order is 'auto': measure the order first"),
        (["optim.teacher=somewhere"], 'optim.teacher is "somewhere" and optim.distillation is 0'),
        (["data.completions=nowhere.jsonl"], r"data.completions: nowhere\.jsonl can't be read"),
        ([*ORDERED, "schedule.order=nowhere.json"], "schedule.order: order file 'nowhere.json' can't be read"),
        ([*ORDERED, "schedule.order=[0,1]"], "schedule.order: order has 2 layers"),
        (["optim.teacher=nowhere/at/all", "optim.distillation=1"], "optim.teacher: 'nowhere/at/all' isn't a"),
    ],
)
def test_invalid_orders_and_teachers_are_refused_before_training(
    changes: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(load_recipe("quickstart", [*SMALL, *changes, f"output.dir={tmp_path / 'run'}"]), "quickstart")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_a_model_taught_by_its_own_frozen_copy_starts_with_zero_loss_and_the_teacher_stays_unchanged(
    ordered: Path, tmp_path: Path
) -> None:
    start = ["model.shape=null", "model.config=null", f"model.name_or_path={ordered}", f"optim.teacher={ordered}"]
    changes = [*start, "optim.distillation=1", "schedule.texts=0", "train.max_steps=2", "schedule.speedups=[1,2]"]
    folder = train_small(tmp_path / "taught", *changes, "schedule.sampling=all")
    (first, second) = metrics(folder)
    alone = train_small(tmp_path / "full", *changes[:-1], "schedule.speedups=[1]", "schedule.decay=linear")
    assert metrics(alone)[0]["loss"] == pytest.approx(0, abs=1e-5)
    assert first["loss"] > 1e-4, "schedules that skip layers differ from the teacher"
    assert first["loss"] != second["loss"]
    before, after = (load_model(str(each)).state_dict() for each in (ordered, folder))
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


def test_a_teacher_of_another_tokenizer_is_refused(ordered: Path, tmp_path: Path) -> None:
    changes = ["model.vocab_size=300", f"optim.teacher={ordered}", "optim.distillation=1"]
    with pytest.raises(ConfigError, match=r"optim\.teacher .* has another vocabulary .*: both must be the same"):
        train_small(tmp_path / "run", *changes)


def test_a_model_is_trained_on_what_another_wrote_for_its_prompts(ordered: Path, tmp_path: Path) -> None:
    words = ["--checkpoint", str(ordered), "--split", "train", "--speedup", "1", "--max-new-tokens", "12"]
    assert eval.cli.main([*words, "--time-limit", "4", "--output", str(tmp_path / "texts")]) == 0
    assert "60 prompts of the train split" in (tmp_path / "texts" / "report.md").read_text()
    file = tmp_path / "texts" / "predictions" / "1x.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # After four steps the model writes the same for every prompt.
    texts = [f"The {number}.00 ferry leaves." for number in range(len(lines))]
    written = [{**line, "prediction": text} for line, text in zip(lines, texts, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in written))
    changes = [*SMALL, "schedule.texts=0", f"output.dir={tmp_path / 'run'}"]
    recipe = load_recipe("quickstart", [*changes, f"data.completions={file}"])
    prepared = prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path / "run"))
    rows = prepared.tokenizer.batch_decode(list(prepared.encoded.rows["completion_ids"]), skip_special_tokens=True)
    assert rows == texts
    written[0]["prompt"] = written[1]["prompt"]  # other data, in which this id is another example
    file.write_text("".join(json.dumps(line) + "\n" for line in written))
    with pytest.raises(ConfigError, match=r"data.completions is .*: it has no prediction for the prompt of "):
        prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path / "run"))
