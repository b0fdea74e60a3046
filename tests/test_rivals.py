"""Every rival is a change of a recipe that trains, and a checkpoint that decodes."""

import subprocess
from functools import partial
from pathlib import Path

import pytest
from small_runs import SMALL, metrics
from tiny_models import ragged_prompts
from transformers import AutoModelForCausalLM

import scripts.experiments.rivals
import scripts.experiments.variants
import train.run
from scripts.experiments.rivals import RIVALS, Rival
from scripts.experiments.variants import Variants, run_jobs
from skipdecode import ConfigError, CostModel, skip_generate
from skipdecode.checkpoint import SkipConfig
from train.run import run

# As e2e-tiny trains, on a shape that has room for three layers that always run.
SETTINGS = [*SMALL, "schedule.sampling=sandwich", "optim.distillation=1.0", "schedule.speedups=[1,2]"]
SETTINGS += ["data.options={train_size: 12, validation_size: 4, test_size: 4}", "train.max_steps=2"]


@pytest.fixture(scope="module")
def variants() -> Variants:
    return Variants("quickstart", tuple(SETTINGS))


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_trains_and_its_checkpoint_decodes(
    name: str, variants: Variants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.run, "draw_schedules", lambda path, schedules: path.touch())  # half of the test's time
    overrides = RIVALS[name].resolve(variants)
    sampler = variants.sampler(overrides)
    run(variants.recipe([*overrides, f"output.dir={tmp_path / name}"]), name)
    assert [line["step"] for line in metrics(tmp_path / name)] == [1, 2]
    config = SkipConfig.load(tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert config is not None
    assert dict(config.schedules) == dict(zip(sampler.speedups, sampler.schedules, strict=True))
    target = 1.0 if name.startswith("shallow") else 2.0
    schedule = config.schedule_for(CostModel.of(model), target)
    ids, mask = ragged_prompts([4, 6], seed=0)
    made = {"custom_generate": skip_generate, "schedule": schedule, "max_new_tokens": 3, "do_sample": False}
    assert model.generate(ids, attention_mask=mask, **made).shape[1] > 6


def test_their_names_and_settings_are_those_of_the_documentation() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "rivals.md").read_text(encoding="utf-8")
    for name, rival in RIVALS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for override in rival.overrides:
            if override not in scripts.experiments.rivals.FULL_DEPTH:
                assert f"`{override}`" in line, override


@pytest.mark.parametrize("speedup", [2.0, 3.0])
def test_a_shallow_model_has_as_many_layers_as_the_mean_budget_of_its_target(speedup: float) -> None:
    variants = Variants("quickstart", tuple(SETTINGS))
    schedule = variants.prepared.skip_config.schedule_for(CostModel.of(variants.prepared.model), speedup)
    mean = sum(schedule.budget(i) for i in range(schedule.horizon)) / schedule.horizon
    (override,) = Rival("", as_fast_as=speedup).resolve(variants)
    assert override == f"model.layers={round(mean)}"


def test_a_target_out_of_reach_is_refused_before_anything_runs(variants: Variants) -> None:
    with pytest.raises(ConfigError, match="reaches at most"):
        Rival("", as_fast_as=50).resolve(variants)


def test_work_counts_the_layers_that_columns_pass(variants: Variants) -> None:
    full = variants.work(RIVALS["full-depth"].overrides)
    shallow = [*RIVALS["full-depth"].overrides, "model.layers=2"]
    assert variants.work(shallow) == pytest.approx(full * 2 / 8)
    assert variants.work(RIVALS["early-exit"].overrides) == pytest.approx(full)
    # A sandwich of full depth and one schedule that skips.
    assert full < variants.work() < 2 * full


def test_what_is_finished_is_not_trained_again(
    variants: Variants, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(scripts.experiments.variants, "run_logged", lambda command, log: commands.append(command))
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished" / "config.json").touch()
    for name in ("finished", "new"):
        variants.train(["train.seed=1"], tmp_path / name, tmp_path / f"{name}.log")
    ((*_, seed, where),) = commands
    assert (seed, where) == ("train.seed=1", f"output.dir={tmp_path / 'new'}")


def test_one_that_fails_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    def job(name: str) -> None:
        if name == "broken":
            raise subprocess.CalledProcessError(2, ["python"])
        done.append(name)

    assert run_jobs({name: partial(job, name) for name in ("first", "broken", "last")}, 2) == ["broken"]
    assert sorted(done) == ["first", "last"]
    assert "broken failed with status 2" in capsys.readouterr().err
