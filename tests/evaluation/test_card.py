"""The model card shows an evaluation in the run's own folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from small_runs import train_small

import eval.cli
from eval.card import CARD, MARK, write_card
from skipdecode.checkpoint.skip_config import SkipConfig

UNMEASURED = "Not measured yet"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(tmp_path_factory.mktemp("card") / "run", "train.max_steps=1")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def evaluate(run: Path, output: Path, *more: str) -> int:
    small = ["--speedup", "1", "3", "--limit", "3", "--max-new-tokens", "6"]
    return eval.cli.main(["--checkpoint", str(run), *small, *more, "--output", str(output)])


def results(run: Path) -> list[Any]:
    return list(ModelCard.load(run / CARD).data.eval_results or [])


def test_an_evaluation_into_a_finished_run_updates_its_model_card(run: Path) -> None:
    assert UNMEASURED in (run / CARD).read_text()
    assert evaluate(run, run / "eval") == 0
    text = (run / CARD).read_text()
    assert UNMEASURED not in text
    for row in json.loads((run / "eval" / "report.json").read_text())["rows"]:
        label, layers, speedup = row["label"], row["mean_layers"], row["wall_clock_speedup"]
        assert f"| {label} | {layers:.2f} of 8 | {label} | {speedup:.2f}x [" in text
    assert "](eval/frontier.png)" in text
    assert "--trust-remote-code` decodes at 2x;" in text


def test_a_checkpoint_with_prompt_stop_is_evaluated_with_it_and_the_report_says_so(tmp_path: Path) -> None:
    run = train_small(tmp_path / "run", "train.max_steps=1", "schedule.prompt=full", "schedule.prompt_stop=2")
    assert "the prompt runs\nthe first 2 of all layers; the others reuse their output." in (run / CARD).read_text()
    trained = SkipConfig.load(run)
    assert trained is not None
    stops = {speedup: schedule.prompt_stop for speedup, schedule in trained.schedules.items()}
    assert stops == {speedup: None if speedup == 1 else 2 for speedup in stops}
    assert evaluate(run, run / "eval") == 0
    rows = json.loads((run / "eval" / "report.json").read_text())["rows"]
    assert [row["schedule"].get("prompt_stop") for row in rows] == [None, 2]


def test_model_card_results_are_of_the_checkpoint_with_speedups_over_the_reference(run: Path, tmp_path: Path) -> None:
    assert "Speedups are relative to the same model at full depth" in (run / CARD).read_text()
    reference = shutil.copytree(run, tmp_path / "deeper")
    assert evaluate(run, run / "eval", "--reference", str(reference)) == 0
    assert [result.metric_name.partition(" (")[0] for result in results(run)] == ["BLEU at full-depth", "BLEU at 3x"]
    assert "Speedups are relative to another model, deeper (the row 1x), at full depth" in (run / CARD).read_text()


@pytest.mark.parametrize(
    ("prompt", "words"), [("full", "all layers"), ("max", "the layers of the largest budget"), (5, "at most 5 layers")]
)
def test_a_model_card_states_the_layers_of_prompts(run: Path, prompt: object, words: str) -> None:
    config = json.loads((run / "config.json").read_text())
    config["skipdecode"]["solver"]["prompt"] = prompt
    (run / "config.json").write_text(json.dumps(config))
    write_card(run)
    assert f"the prompt runs\n{words}." in (run / CARD).read_text()


def test_model_card_results_are_of_the_evaluated_task(run: Path, tmp_path: Path) -> None:
    (tmp_path / "testset_w_refs.csv").write_text("mr,ref\nname[Aromi],Aromi is here.\n")
    assert evaluate(run, run / "eval", "--task", "e2e", "--data-dir", str(tmp_path)) == 0
    assert {(result.dataset_name, result.dataset_type) for result in results(run)} == {("e2e", "tuetschek/e2e_nlg")}


def test_an_evaluation_outside_the_run_folder_does_not_change_the_model_card(run: Path, tmp_path: Path) -> None:
    before = (run / CARD).read_bytes()
    assert evaluate(run, tmp_path / "elsewhere") == 0
    assert (run / CARD).read_bytes() == before


def test_an_edited_model_card_is_not_overwritten(run: Path) -> None:
    mine = (run / CARD).read_text().replace(MARK, "").encode() + b"\xe9"  # in Latin-1
    (run / CARD).write_bytes(mine)
    assert evaluate(run, run / "eval") == 0
    assert (run / CARD).read_bytes() == mine


def test_a_checkpoint_without_a_recipe_gets_no_model_card(run: Path) -> None:
    (run / "recipe.yaml").unlink()
    (run / CARD).unlink()
    assert evaluate(run, run / "eval") == 0
    assert not (run / CARD).exists()


def test_an_invalid_recipe_is_named_in_the_message_and_the_evaluation_is_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "recipe.yaml").write_text("model: {name_or_path: null}\n")
    before = (run / CARD).read_bytes()
    assert evaluate(run, run / "eval") == 0
    assert f"the model card wasn't updated: {run / 'recipe.yaml'} is not the recipe of a run" in capsys.readouterr().err
    assert (run / CARD).read_bytes() == before
    assert (run / "eval" / "report.json").exists()
