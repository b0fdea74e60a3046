"""A run that was interrupted after its training lists its remaining stages when it is restarted, and does them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_runs import metrics, train_small

import train.run
from eval.results import Report
from skipdecode import ConfigError
from train.stages import NEXT_STAGE_FILE, STAGES

EVERY_STAGE = ["tracking.wandb=offline", "publish.repository=me/small", "evaluation.speedups=[1,3]"]
EVERY_STAGE += ["evaluation.limit=2", "evaluation.max_new_tokens=4", "train.max_steps=1"]
# The functions of train.run and of the tracker that do the stages.
WORK = {"evaluate_run": STAGES[0], "write_card": STAGES[2], "send": STAGES[3]}
TRACKED = {"evaluation": STAGES[1], "checkpoint": STAGES[4]}


class Stages:
    """Replaces the stages of a run, records them and makes one fail.

    Attributes:
        done: the stages that were started, in order.
        failing: the stage that fails, with its error.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, evaluated: Path) -> None:
        self.done: list[str] = []
        self.failing: dict[str, Exception] = {}
        works = {
            "evaluate_run": lambda recipe, task, folder: shutil.copytree(evaluated / "eval", folder / "eval"),
            "write_card": train.run.write_card,
            "send": lambda *_, **__: "sent",
        }
        for name, stage in WORK.items():
            monkeypatch.setattr(train.run, name, self._watched(stage, works[name]))
        tracker: Any = type("Tracker", (), {name: self._watched(stage, self._seen) for name, stage in TRACKED.items()})

        @contextmanager
        def tracked(*_: Any) -> Iterator[Any]:
            yield tracker

        monkeypatch.setattr(train.run, "tracked", tracked)

    def _watched(self, stage: str, real: Any) -> Any:
        def begin(*arguments: Any, **options: Any) -> Any:
            self.done.append(stage)
            if stage in self.failing:
                raise self.failing[stage]
            return real(*arguments, **options)

        return staticmethod(begin)

    @staticmethod
    def _seen(folder: Path, report: Report | None = None) -> None:
        assert report is None or [row.label for row in report.rows] == ["1x", "3x"]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = [word for word in EVERY_STAGE if word.startswith(("evaluation.", "train."))]
    return train_small(tmp_path_factory.mktemp("stages") / "run", *settings)


@pytest.fixture
def trained(evaluated: Path, tmp_path: Path) -> Path:
    """A run that was killed at the start of its evaluation."""
    folder = shutil.copytree(evaluated, tmp_path / "run")
    shutil.rmtree(folder / "eval")
    (folder / "README.md").unlink()
    return folder


@pytest.mark.parametrize(
    ("stage", "error"),
    [*((stage, ConfigError("no")) for stage in STAGES), ("the results in W&B", RuntimeError("a fault of the code"))],
    ids=str,
)
def test_a_run_that_failed_after_training_lists_its_remaining_stages_and_continues_with_them(
    stage: str, error: Exception, trained: Path, evaluated: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, number = Stages(monkeypatch, evaluated), STAGES.index(stage)  # type: ignore[arg-type]
    stages.failing = {stage: error}
    advice = f"no; {trained} is trained, and the same command continues with {stage}"
    with pytest.raises(type(error)) as raised:
        train_small(trained, *EVERY_STAGE)
    assert str(raised.value) == (advice if isinstance(error, ConfigError) else str(error))
    assert tuple(stages.done) == STAGES[: number + 1]

    capsys.readouterr()
    stages.done, stages.failing = [], {}
    assert train_small(trained, *EVERY_STAGE) == trained
    said = " ".join(capsys.readouterr().err.split())
    assert f"is trained; these stages remain to be done: {', '.join(STAGES[number:])}" in said
    assert tuple(stages.done) == STAGES[number:]
    assert len(metrics(trained)) == 1
    assert not (trained / NEXT_STAGE_FILE).exists()
    with pytest.raises(ConfigError, match="already holds a finished run"):
        train_small(trained, *EVERY_STAGE)


def test_a_stage_removed_from_the_recipe_is_skipped(
    trained: Path, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Stages(monkeypatch, evaluated)
    stages.failing = {"publishing": ConfigError("no")}
    with pytest.raises(ConfigError):
        train_small(trained, *EVERY_STAGE)
    stages.done = []
    assert train_small(trained, *EVERY_STAGE, "publish.repository=null") == trained
    assert stages.done == ["the checkpoint in W&B"]


def test_an_evaluation_added_later_is_done_with_the_stages_after_it(
    trained: Path, evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_small(trained, "train.max_steps=1") == trained
    assert "## Limits" in (trained / "README.md").read_text(), "the missing model card is written"
    assert len(metrics(trained)) == 1
    with pytest.raises(ConfigError, match="already holds a finished run"):
        train_small(trained, "train.max_steps=1")
    stages = Stages(monkeypatch, evaluated)
    assert train_small(trained, *EVERY_STAGE) == trained
    assert tuple(stages.done) == STAGES


def test_a_folder_with_an_unknown_next_stage_is_refused(trained: Path) -> None:
    (trained / NEXT_STAGE_FILE).write_text("thesis\n")
    with pytest.raises(ConfigError, match=r"next_stage holds 'thesis': expected one of the evaluation, "):
        train_small(trained, "train.max_steps=1")
