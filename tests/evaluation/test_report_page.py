"""The page of finished evaluations, parsed as a browser would and compared with its reports."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import finished_runs
import pytest
from finished_runs import save, speed_report, write_calm_run, write_run
from matplotlib.figure import Figure

import eval.drawing
from eval.drawing import draw_frontier
from eval.report.cli import main
from eval.report.comparison import spread
from eval.report.page import marked
from eval.results import Report
from eval.speed.report import SpeedReport
from skipdecode.errors import ConfigError
from skipdecode.schedule.schedule import Over

VOID = {"meta", "input", "br", "hr", "img", "link"}
EVIL = "</style><script>alert('x')</script> & \"quoted\" | $x_1$ ` <b>"


class Page(HTMLParser):
    """The elements of a page; fails on elements that are not closed or closed twice."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open  # in HTML, self-closing has no effect
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements for key, value in attributes.items() if key == name and value]


def no_picture(figure: Any, file: Any, **_: Any) -> None:
    """Replaces `Figure.savefig`."""
    file.write('<svg viewBox="0 0 1 1"><defs></defs></svg>')


def build(tmp_path: Path, *runs: str, pictures: bool = False, **options: str) -> tuple[Page, str, dict[str, Any]]:
    """The page of runs; without `pictures` figures are empty, which takes a fifth of the time."""
    output = tmp_path / "out" / "page.html"
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patch:
        if not pictures:
            patch.setattr(Figure, "savefig", no_picture)
        assert main([*runs, "--output", str(output), *words]) == 0
    html = output.read_text(encoding="utf-8")
    return Page(html), html, json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


@dataclass(frozen=True)
class Built:
    """Two runs, `first run` in the folder a and `b` in the folder b, and the page of both with a speed benchmark."""

    folder: Path
    arguments: list[str]
    page: Page
    html: str
    values: dict[str, Any]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("two")
    write_run(folder / "a")
    write_run(folder / "b", speedups=(1.0, 2.0, 4.0), seed=1)
    (folder / "speed.json").write_text(speed_report().to_json())
    arguments = [f"first run={folder / 'a'}", str(folder / "b")]
    return Built(folder, arguments, *build(folder, *arguments, pictures=True, speed=str(folder / "speed.json")))


def test_every_figure_on_the_page_is_in_a_report(built: Built) -> None:
    reports = [json.loads((built.folder / name / "report.json").read_text()) for name in "ab"]
    known = {repr(number) for number in numbers([*reports, json.loads((built.folder / "speed.json").read_text())])}
    shares = {repr(number) for line in built.values["lines"] for number in numbers(line["positions"])}
    shown = built.page.attributes("value")
    assert set(shown) <= known | shares
    assert {repr(s) for r in reports for row in r["rows"] for s in row["scores"].values()} <= set(shown)
    assert {repr(row["wall_clock_speedup"]) for r in reports for row in r["rows"]} <= set(shown)
    # The text on the page is that number, rounded.
    for value, text in re.findall(r'<data value="([^"]+)">([\d.]+)x?</data>', built.html):
        decimals = len(text.partition(".")[2])
        assert float(text) == pytest.approx(float(value), abs=0.5001 * 10**-decimals) or float(value) > 4000  # bytes
    assert set(shown) <= {repr(number) for number in numbers(built.values)}


def test_the_page_is_self_contained_and_well_formed(built: Built) -> None:
    page, html = built.page, built.html
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "video", "base", "form"})
    for name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster", "background"):
        assert all(value.startswith("#") for value in page.attributes(name))
    assert not re.search(r"@import|url\((?!#)", html)
    assert "://" not in html
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    referred = {value[1:] for value in page.attributes("href")} | set(re.findall(r"url\(#([^)]+)\)", html))
    referred |= {name for value in page.attributes("aria-labelledby") for name in value.split()}
    assert referred <= set(ids)


def test_every_picture_has_a_title_and_every_table_has_headers(built: Built) -> None:
    html = built.html
    pictures = html.split("<svg")[1:]
    # five metrics; words and word pairs of two runs; three schedule maps per run
    assert len(pictures) == len(finished_runs.METRICS) + 2 * 2 + 2 * 3
    assert all('role="img"' in svg and "<title" in svg and "<desc" in svg for svg in pictures)
    assert "first run: " in pictures[0]
    assert html.count("<table") == html.count("<caption") == html.count("<thead") == html.count('class="scroll')
    assert "slot error rate, lower is better" in html
    drawn = "".join(svg.split("</svg>")[0] for svg in pictures)
    assert not re.search("#[0-9a-f]{6}", drawn)  # all colours are variables


def test_the_page_is_deterministic(built: Built, tmp_path: Path) -> None:
    build(tmp_path, *built.arguments, pictures=True, speed=str(built.folder / "speed.json"))
    for suffix in ("html", "md", "json"):
        one, other = ((folder / "out" / f"page.{suffix}").read_bytes() for folder in (built.folder, tmp_path))
        assert one == other


def test_the_content_of_runs_is_escaped(tmp_path: Path) -> None:
    changes = {"command": EVIL, "checkpoint": EVIL, "task": EVIL}
    changes |= {"machine": {EVIL: EVIL, "processor": EVIL, "threads": 1}}
    write_run(tmp_path / "plain", text=EVIL, metrics={"bleu": EVIL}, unavailable={"meteor": EVIL}, **changes)
    page, _, values = build(tmp_path, f"{EVIL}={tmp_path / 'plain'}", pictures=True)
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "b"})
    assert [tag for tag, _ in page.elements].count("style") == 1
    text = "".join(page.text)
    for place in ("name: 0", "checkpoint", "command"):
        assert EVIL in text.split(place, 1)[1]
    assert values["samples"][0]["prompt"].endswith(EVIL + "\n")
    markdown = (tmp_path / "out" / "page.md").read_text()
    assert "<script" not in markdown
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", tables[0])) for line in tables[:2])


def test_samples_are_prompts_common_to_all_runs_and_evenly_spread(tmp_path: Path) -> None:
    write_run(tmp_path / "a", examples=30)
    write_run(tmp_path / "b", examples=24, seed=1)
    page, html, values = build(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"), samples="4")
    assert values["shared_prompts"] == 24
    assert [sample["id"] for sample in values["samples"]] == ["test-0", "test-8", "test-15", "test-23"]
    assert "a decoded 30 prompts, of which\n24 are common to all runs" in "".join(page.text)
    for sample in values["samples"]:
        assert [(text["line"], text["label"]) for text in sample["texts"]] == [
            (run, label) for run in "ab" for label in ("1x", "2x", "3x")
        ]
        for text in sample["texts"]:
            pieces = marked(text["text"], text["full_depth"])
            assert "".join(piece for piece, _ in pieces) == text["text"]
            assert any(differs for _, differs in pieces) == (text["label"] != "1x")
    assert html.count("<article") == 4


def test_prompts_of_other_data_with_equal_ids_are_not_shared(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, data=1)
    page, _, values = build(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (values["shared_prompts"], values["samples"]) == (0, [])
    assert "b decoded 30 prompts, of which\n0 are common to all runs: scores on different" in "".join(page.text)


def test_baseline_tables_hold_the_nearest_rows_by_measured_speedup(built: Built) -> None:
    values = built.values
    assert [nearest["speed"] for nearest in values["baselines"]] == [2, 3, 4]
    for nearest in values["baselines"]:
        for line, label in zip(values["lines"], nearest["labels"], strict=True):
            times = {p["label"]: p["wall_clock_speedup"] / nearest["speed"] for p in line["points"][1:]}
            apart = {name: max(ratio, 1 / ratio) for name, ratio in times.items()}
            near = min(apart, key=lambda name: apart[name])
            assert label == (near if apart[near] <= 1.25 else None)
    assert None in [label for nearest in values["baselines"] for label in nearest["labels"]]


def test_the_memory_bound_speedup_is_shown_except_for_older_reports(tmp_path: Path) -> None:
    report = write_run(tmp_path / "a")
    rows = [replace(row, bound_by_bytes=1.5 * n) for n, row in enumerate(report.rows, 1)]
    save(replace(report, rows=rows), tmp_path / "a")
    before = json.loads((tmp_path / "a" / "report.json").read_text())
    _, html, values = build(tmp_path, str(tmp_path / "a"))
    assert [point["bound_by_bytes"] for point in values["lines"][0]["points"]] == [1.5, 3.0, 4.5]
    assert '<data value="4.5">4.50x</data>' in html
    for row in before["rows"]:
        del row["bound_by_bytes"]
    (tmp_path / "a" / "report.json").write_text(json.dumps(before))
    (tmp_path / "page").mkdir()
    _, html, values = build(tmp_path / "page", str(tmp_path / "a"))
    assert all(point["bound_by_bytes"] is None for point in values["lines"][0]["points"])
    assert '<th scope="col">memory-bound speedup</th>' not in html


def test_the_page_shows_agreement_by_position_and_lossless_rows_beside_the_line(tmp_path: Path) -> None:
    generator = random.Random(3)
    full, fast = finished_runs.row(1.0, generator), finished_runs.row(3.0, generator)
    places = [(20, 20), (19, 20), (17, 20), (14, 16), (9, 12), (2, 4)]
    fast = replace(fast, agreement=places, lossless_speedup=1.75)
    lossless = replace(finished_runs.row(2.0, generator), label="lossless-3x", system="lossless", scores=full.scores)
    write_run(tmp_path / "a", rows=[full, fast, replace(lossless, speedup_target=None, same_texts=29)])
    page, html, values = build(tmp_path, str(tmp_path / "a"))
    assert headers_of(html, "a: quality")[-2:] == ["agreement", "lossless speedup"]
    assert "<td>88.0 %</td>" in html  # 81 of 92
    assert '<data value="1.75">1.75x</data>' in html
    by_place = html.split("tokens equal to full depth&#39;s choice</caption>")[1].split("</table>")[0]
    cells = re.findall(r"<t[hd][^>]*>([^<]+)</t[hd]>", by_place)
    assert cells == ["tokens", "3x", "1 to 5", "89.8 %", "6 to 10", "50.0 %"]
    assert "lossless-3x: 29 of 30 outputs are identical to those of the 1x row." in "".join(page.text)
    lossless_note = "Lossless decoding at batch 1 with a row's schedule as the draft, on a sample: 3x 1.75x."
    assert lossless_note in "".join(page.text)
    assert len(values["lines"][0]["points"]) == 3


def headers_of(html: str, caption: str) -> list[str]:
    table = html.split(f"<caption>{caption}</caption>")[1].split("</thead>")[0]
    return re.findall(r'<th scope="col">([^<]*)</th>', table)


@pytest.mark.parametrize(("over", "shown"), [("decode", "decode"), ("all", "end-to-end")])
def test_the_page_shows_target_and_both_speedups_and_says_which_one_the_target_is_for(
    over: Over, shown: str, tmp_path: Path
) -> None:
    report = write_run(tmp_path / "a", over=over)
    page, html, values = build(tmp_path, str(tmp_path / "a"), pictures=True)
    speeds = ["target", "speedup (decode)", "speedup (end-to-end)"]
    for caption in ("a: quality", "a: speed", "a: speed by batch size"):
        assert [header for header in headers_of(html, caption) if header in speeds] == speeds
    assert f"quality against measured {shown} speedup" in html
    assert f"measured {shown} speedup over full depth" in html  # the axis
    assert f"a (targets are {shown} speedups)" in "".join(page.text)
    assert f"Targets apply to the {shown} speedup, solved for each batch size by " in "".join(page.text)
    assert values["over"] == over
    points = values["lines"][0]["points"]
    assert {row.label for row in report.rows} == {point["label"] for point in points}
    wanted = {"decode": "wall_clock_speedup", "all": "whole_speedup"}[over]
    speed = {point["label"]: point[wanted] if over == "decode" else point[wanted]["median"] for point in points}
    assert f"at {speed['2x']:.2f}x" in html.split("<desc")[1]  # the description of the picture


def test_runs_with_different_kinds_of_targets_are_compared_by_decode_speedup(tmp_path: Path) -> None:
    write_run(tmp_path / "a", over="all")
    older = write_run(tmp_path / "b", seed=1)
    finished_runs.save_as_before_whole_speeds(older, tmp_path / "b")
    _, html, values = build(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"))
    assert values["over"] == "decode"
    assert "a (targets are end-to-end speedups), b (targets are decode speedups)." in html
    assert "<td>–</td>" in html.split("<caption>b: speed</caption>")[1]
    assert "b was written by an earlier version: its speedups are per decode step" in html
    assert "a was written by an earlier version" not in html


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A run of confidence exits."""
    folder = tmp_path_factory.mktemp("exits")
    write_calm_run(folder / "calm")
    arguments = [str(folder / "calm")]
    return Built(folder, arguments, *build(folder, *arguments))


def test_the_page_shows_confidence_exits_with_thresholds_and_timings(calm: Built) -> None:
    page = calm.page
    (line,) = calm.values["lines"]
    assert {point["label"] for point in line["points"]} == {"1x", "calm-2x", "calm-0.375"}
    assert line["full_depth"]["label"] == "1x"
    text = " ".join("".join(page.text).split())
    # In the tables of quality, speed and baselines; twice in that of batch sizes.
    assert text.count("calm-2x, λ 0.625") == 5
    assert "decode speedup" in text
    exits = re.findall(r"reaches the threshold: (.*?)\.\s", text + " ")[0].split(", ")
    assert {"calm-2x (λ 0.625)", "calm-0.375 (λ 0.375)"} == set(exits)
    assert "64 validation prompts run at most the 4.00 layers" in text
    shown = set(page.attributes("value"))
    for row in Report.load(calm.folder / "calm" / "report.json").rows:
        assert len(row.timings) == 2
        assert set(map(repr, numbers([asdict(timing) for timing in row.timings]))) <= shown
    assert "calm: speed by batch size" in calm.html


def test_the_page_describes_metrics_and_reasons_for_missing_ones(calm: Built) -> None:
    notes = "".join(calm.page.text).split("Versions and commands")[1]
    for text in (notes, (calm.folder / "out" / "page.md").read_text()):
        assert "BLEU: a library's BLEU, version 1." in text
        assert "SER: slots that are wrong." in text
        assert "METEOR: not computable, because its data is not here." in text


def test_the_reference_of_a_run_is_a_separate_line(tmp_path: Path) -> None:
    generator = random.Random(5)
    full = finished_runs.row(1.0, generator, "outputs/reference")
    own = [replace(finished_runs.row(1.0, generator), label="full-depth", speedup_target=None)]
    own.append(finished_runs.row(2.0, generator))
    write_run(tmp_path / "a", rows=[full, *own], reference="outputs/reference")
    _, _, values = build(tmp_path, str(tmp_path / "a"))
    assert [line["name"] for line in values["lines"]] == ["a: reference", "a"]
    assert [point["label"] for point in values["lines"][1]["points"]] == ["full-depth", "2x"]
    assert all(line["full_depth"]["checkpoint"] == "outputs/reference" for line in values["lines"])


def test_the_page_compares_a_shallow_model_with_skipping_at_the_same_speed(tmp_path: Path) -> None:
    generator = random.Random(5)
    full, like = finished_runs.row(1.0, generator, "outputs/deep"), finished_runs.row(3.0, generator)
    shallow = replace(like, label="full-depth", system="full depth", speedup_target=None, num_layers=3, mean_layers=3.0)
    write_run(tmp_path / "skips", speedups=(1.0, 3.0))
    write_run(tmp_path / "shallow", rows=[full, shallow], reference="outputs/deep")
    _, _, values = build(tmp_path, str(tmp_path / "skips"), str(tmp_path / "shallow"))
    assert [line["name"] for line in values["lines"]] == ["skips", "shallow: deep", "shallow"]
    (about,) = values["baselines"]
    assert (about["speed"], about["labels"]) == (3, ["3x", None, "full-depth"])


def test_targets_with_the_same_schedule_share_a_label_in_the_picture(tmp_path: Path, monkeypatch: Any) -> None:
    """Their points coincide except for timing noise."""
    found: list[str] = []

    def noted(path: Path, figure: Figure) -> None:
        found.extend(text.get_text() for text in figure.axes[0].texts if "layers" in text.get_text())

    report = write_run(tmp_path / "a", speedups=(1.0, 2.0, 3.0))
    same = replace(report.rows[2], label="2.8x", speedup_target=2.8, wall_clock_speedup=2.9)
    monkeypatch.setattr(eval.drawing, "save_png", noted)
    draw_frontier(tmp_path / "picture.png", {"a": replace(report, rows=[*report.rows, same])}, "")
    assert found == ["target 1x\n8.0 layers", "target 2x\n4.0 layers", "target 3x, 2.8x\n3.0 layers"]


def test_labels_of_nearby_points_in_the_picture_do_not_overlap(tmp_path: Path, monkeypatch: Any) -> None:
    boxes: list[Any] = []

    def noted(path: Path, figure: Figure) -> None:
        figure.draw_without_rendering()
        boxes.extend(text.get_window_extent() for text in figure.axes[0].texts if "layers" in text.get_text())

    report = write_run(tmp_path / "a", speedups=(1.0, 2.0, 3.0))
    row = report.rows[2]
    near = [replace(row, mean_layers=n, wall_clock_speedup=2.85 + n / 20) for n in (1.0, 2.0)]
    monkeypatch.setattr(eval.drawing, "save_png", noted)
    draw_frontier(tmp_path / "picture.png", {"a": replace(report, rows=[*report.rows, *near])}, "")
    assert len(boxes) == 5
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_an_evaluation_of_the_current_folder_is_named_after_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "e2e-tiny" / "eval", checkpoint=".")
    _, _, values = build(tmp_path, str(tmp_path / "e2e-tiny" / "eval"))
    assert [line["name"] for line in values["lines"]] == ["e2e-tiny"]


def test_the_page_shows_a_speed_benchmark_read_from_its_json(built: Built) -> None:
    assert SpeedReport.load(built.folder / "speed.json") == speed_report()
    assert "speed: opt, float32, batch 1" in built.html
    assert {"2.125", "1.875", "2.25", "0.75", "4096"} <= set(built.page.attributes("value"))
    assert built.values["speeds"]["speed"]["rows"][0]["bound_speedup"] == 2.25
    assert "50x: no" in built.html


def test_prompts_spread_evenly_with_both_ends() -> None:
    assert spread("abcdefghij", 4) == ["a", "d", "g", "j"]
    assert spread("abc", 12) == ["a", "b", "c"]
    assert spread("abc", 1) == ["a"]
    assert spread("abc", 0) == []


def refused(capsys: Any, *arguments: str) -> str:
    assert main([*arguments]) == 2
    error: str = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_invalid_runs_are_refused_before_anything_is_written(built: Built, tmp_path: Path, capsys: Any) -> None:
    out = ["--output", str(tmp_path / "out" / "page.html")]
    a, b = built.folder / "a", built.folder / "b"
    assert "there is no such folder" in refused(capsys, str(tmp_path / "c"), *out)
    assert "it has no report.json" in refused(capsys, str(tmp_path), *out)
    assert "two runs are called 'a'" in refused(capsys, str(a), f"a={b}", *out)
    assert "the name before the = is empty" in refused(capsys, f"={b}", *out)
    assert "name a .html file" in refused(capsys, str(a), "--output", str(tmp_path / "page.htm"))
    assert "--samples is -1" in refused(capsys, str(a), *out, "--samples", "-1")
    assert "is not a report of a speed benchmark" in refused(capsys, str(a), *out, "--speed", str(a / "report.json"))
    write_run(tmp_path / "c", task="cnndm")
    assert "'c' is of the task cnndm, 'a' of e2e" in refused(capsys, str(a), str(tmp_path / "c"), *out)
    assert not (tmp_path / "out").exists()
    for suffix in ("json", "md", "html"):
        there = tmp_path / f"there-{suffix}.{suffix}"
        there.write_text("")
        assert "already exists" in refused(capsys, str(a), "--output", str(there.with_suffix(".html")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: None, "can't be read"),
        (lambda lines: lines[:-1], "holds 29 predictions, but the report beside it has 30 prompts"),
        (lambda lines: [lines[0].replace('"id"', '"number"'), *lines[1:]], "the field 'id' is missing"),
        (lambda lines: [lines[0].replace("name: 0", "name: \\ud800"), *lines[1:]], "unpaired surrogate"),
        (lambda lines: lines[::-1], "different prompts or references"),
    ],
)
def test_predictions_that_do_not_match_the_report_are_refused(
    damage: Any, message: str, tmp_path: Path, capsys: Any
) -> None:
    write_run(tmp_path / "a")
    file = tmp_path / "a" / "predictions" / "2x.jsonl"
    lines = damage(file.read_text().splitlines())
    file.unlink() if lines is None else file.write_text("\n".join(lines) + "\n")
    assert message in refused(capsys, str(tmp_path / "a"), "--output", str(tmp_path / "page.html"))


NO_REPORT = "is not a report of an evaluation"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report, row: report.update(rows=[]), "has no rows"),
        (lambda report, row: report.update(surprise=1), NO_REPORT),
        (lambda report, row: report.update(checkpoint="\ud800"), NO_REPORT),
        (lambda report, row: report.update(over="both"), "over is 'both': input should be 'decode' or 'all'"),
        (lambda report, row: report.update(machine={}), NO_REPORT),
        (lambda report, row: report.update(metrics=None), NO_REPORT),
        (lambda report, row: row.update(scores={"surprise": 1.0}), "a score named 'surprise', which is not a metric"),
        (lambda report, row: row.update(schedule=None), "either a schedule or a threshold"),
        (lambda report, row: row.update(schedule={"num_layers": 8}), "schedule field 'max_layers' is missing"),
        (lambda report, row: row.update(intervals=[]), NO_REPORT),
        (lambda report, row: row.update(wall_clock_quartiles=(1.0,)), NO_REPORT),
        (lambda report, row: row.update(wall_clock_speedup=0.0), "a target or a number of layers that isn't above 0"),
        (lambda report, row: row.update(layers_per_step=float("nan")), NO_REPORT),
        (lambda report, row: row["scores"].update(bleu=float("nan")), NO_REPORT),
        (lambda report, row: row["scores"].update(bleu=None), NO_REPORT),
        (lambda report, row: row["timings"][0].update(decode_seconds=float("inf")), NO_REPORT),
        (lambda report, row: row["timings"][0].update(decode_seconds=None), NO_REPORT),
    ],
)
def test_a_report_that_no_evaluation_can_write_is_refused(
    change: Any, message: str, tmp_path: Path, capsys: Any
) -> None:
    write_run(tmp_path / "a")
    file = tmp_path / "a" / "report.json"
    report = json.loads(file.read_text())
    change(report, report["rows"][1])
    file.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=re.escape(message)):  # wherever it is read, as by --compare
        Report.load(file)
    assert message in refused(capsys, str(tmp_path / "a"), "--output", str(tmp_path / "page.html"))


def test_a_lossless_row_may_have_neither_schedule_nor_threshold(tmp_path: Path) -> None:
    report = write_run(tmp_path / "a")
    lossless = replace(report.rows[1], system="lossless", schedule=None, speedup_target=None)
    save(replace(report, rows=[report.rows[0], lossless, report.rows[2]]), tmp_path / "a")
    page, _, _ = build(tmp_path, str(tmp_path / "a"))
    assert repr(lossless.wall_clock_speedup) in page.attributes("value")
