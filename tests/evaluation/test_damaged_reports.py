"""Any file given as a report is accepted or refused with a one-line error, never a traceback."""

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import finished_runs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

import eval.report.cli
import eval.speed.cli
from eval.card import _frontier
from eval.drawing import draw_quality
from eval.report.comparison import compare
from eval.report.page import to_markdown
from eval.report.runs import Run
from eval.report.tables import benchmark_tables
from eval.results import Report, Threshold
from eval.score.predictions import Prediction
from eval.score.registry import headline
from eval.speed.merge import MergedReport
from eval.speed.report import SpeedReport
from skipdecode import ConfigError

REMOVED = "removed"
VALUES = st.one_of(
    st.sampled_from([REMOVED, None, "", "x", "7", "\ud800", -1, 0, 1.5, True, 10**400, [], [1], [[]], {}, {"a": 1}]),
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=5),
)

LINE = Prediction("a file, line 1", "1", "name: Aromi", "Aromi is a pub.", ("A pub is Aromi.",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a row of every kind, and two speed reports."""
    folder = tmp_path_factory.mktemp("reports")
    report = finished_runs.write_run(folder / "run", examples=1)
    generator = finished_runs.random.Random(1)
    calm = finished_runs.calm_row(Threshold(0.5, 3.0, 3.1, 64), generator, 2.0)
    lossless = replace(report.rows[1], label="lossless-2x", system="lossless", agreement=[(1, 2), (0, 1)])
    whole = replace(report, rows=[*report.rows, calm, lossless], unavailable={"meteor": "its data is not here"})
    whole.save(folder / "run")
    for name, date in (("first", "2026-11-21"), ("second", "2026-11-22")):
        (folder / f"{name}.json").write_text(finished_runs.speed_report(date).to_json())
    return folder


def paths(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value within JSON values."""
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def damaged(values: Any, data: st.DataObject) -> Any:
    """The values with one value replaced or removed."""
    values = {"all": copy.deepcopy(values)}
    *way, last = data.draw(st.sampled_from([("all", *path) for path in paths(values["all"])]))
    place: Any = values
    for key in way:
        place = place[key]
    new = data.draw(VALUES)
    if new is REMOVED and way:
        del place[last]
    else:
        place[last] = new
    return values["all"]


def write(path: Path, values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def check_line(error: ConfigError, path: Path) -> None:
    """The error is one line that names the file."""
    message = str(error)
    assert "\n" not in message
    assert path.name in message
    assert len(message) < 1000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_report_is_accepted_or_refused_with_a_one_line_error(folder: Path, data: st.DataObject) -> None:
    values = json.loads((folder / "run" / "report.json").read_text())
    path = write(folder / "damaged.json", damaged(values, data))
    try:
        report = Report.load(path)
    except ConfigError as error:
        check_line(error, path)
        return
    axes = Figure().add_subplot()
    for row in report.rows:
        draw_quality(axes, 0, "row", [row], headline(row.scores), report.over)
    _frontier(report, folder)
    comparison = compare([Run("damaged", report, tuple((LINE,) for _ in report.rows))], {}, samples=1)
    comparison.to_json()
    to_markdown(comparison)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_speed_report_is_accepted_or_refused_with_a_one_line_error(folder: Path, data: st.DataObject) -> None:
    path = write(folder / "damaged.json", damaged(json.loads((folder / "second.json").read_text()), data))
    try:
        report = SpeedReport.load(path)
        for table in benchmark_tables("damaged", report):
            table.to_markdown()
        json.dumps(asdict(report))
        merged = MergedReport((SpeedReport.load(folder / "first.json"), report))
        merged.check([folder / "first.json", path])
    except ConfigError as error:
        check_line(error, path)
        return
    merged.to_markdown()


FILES: dict[str, bytes | None] = {
    "a folder": None,
    "empty": b"",
    "bytes": bytes(range(256)),
    "UTF-16": '{"rows": []}'.encode("utf-16"),
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "deeply nested": b"[" * 100_000,
    "another tool's": b'{"results": {"hellaswag": {"acc": 0.5}}, "config": {"model": "hf"}}',
    "rows of another tool": b'{"rows": [{"a": 1}], "model": "x"}',
    "a page": b"<!DOCTYPE html>",
}


@pytest.mark.parametrize("kind", [*FILES, "missing", "cut off", "the other kind"])
def test_a_file_that_is_not_a_report_is_refused_with_a_one_line_error_by_every_option(
    kind: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    run, speed = folder / "run" / "report.json", folder / "first.json"
    for good, other in ((run, speed), (speed, run)):
        path = tmp_path / good.stem / "report.json"
        path.parent.mkdir()
        if kind == "a folder":
            path.mkdir()
        elif kind != "missing":
            text = good.read_bytes()
            path.write_bytes({"cut off": text[: len(text) // 2], "the other kind": other.read_bytes(), **FILES}[kind])
        if good is run:
            with pytest.raises(ConfigError) as caught:  # as --compare of `python -m eval` and the model card read it
                Report.load(path)
            check_line(caught.value, path)
            commands = [(eval.report.cli.main, [str(path.parent), "--output", str(tmp_path / "page.html")])]
        else:
            merge = ["--merge", str(speed), str(path), "--output", str(tmp_path / "merged.md")]
            page = [str(run.parent), "--speed", str(path), "--output", str(tmp_path / "page.html")]
            commands = [(eval.speed.cli.main, merge), (eval.report.cli.main, page)]
        for command, arguments in commands:
            assert command(arguments) == 2
            error = capsys.readouterr().err
            assert error.startswith("error: ")
            assert error.count("\n") <= 2  # the second line names the file that wasn't written
    assert not list(tmp_path.glob("*.*"))


def test_the_error_of_a_damaged_report_names_the_field_its_value_and_what_is_allowed(
    folder: Path, tmp_path: Path
) -> None:
    values = json.loads((folder / "run" / "report.json").read_text())
    values["rows"][1]["tokens"] = "many"
    with pytest.raises(ConfigError, match=r"rows\.1\.tokens is 'many': input should be a valid integer"):
        Report.load(write(tmp_path / "report.json", values))
    del values["rows"][1]["tokens"]
    with pytest.raises(ConfigError, match=r"rows\.1\.tokens is missing"):
        Report.load(write(tmp_path / "report.json", values))
