"""The scores of an evaluation: intervals, significance, tables, and equality with scores of its prediction files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import train_small_on
from tiny_bert import save_tiny_bert

import eval.cli
import eval.score.cli
from eval.loading import load_checkpoint
from eval.results import Report
from eval.score.metric import BertModel
from eval.score.scores import Scores, score
from eval.systems.base import SkipSystem
from skipdecode import SkipSchedule
from skipdecode.timing.interleave import Ratio

MEANINGS = ["name[Aromi], area[riverside]", "name[Zizzi], food[Italian], near[The Mill]", "name[Cotto], eatType[pub]"]
REFERENCES = [
    ["Aromi is by the river.", "By the river: Aromi."],
    ["Zizzi is Italian, near The Mill."],
    ["A pub: Cotto."],
]


def folder_of_e2e(folder: Path) -> Path:
    folder.mkdir()
    rows = [f'"{mr}","{text}"\n' for mr, texts in zip(MEANINGS, REFERENCES, strict=True) for text in texts]
    for name in ("devset.csv", "testset_w_refs.csv"):
        (folder / name).write_text("mr,ref\n" + "".join(rows) * 4, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation on a small E2E, delexicalised, with BERTScore."""
    folder = tmp_path_factory.mktemp("e2e")
    data = str(folder_of_e2e(folder / "data"))
    section = f"{{task: e2e, path: {data}, options: {{delexicalise: [name, food]}}}}"
    run = train_small_on(section, folder / "run", "train.max_steps=4")
    arguments = ["--checkpoint", str(run), "--data-dir", data, "--speedup", "3", "--max-new-tokens", "12"]
    bert = ["--bertscore-model", str(save_tiny_bert(folder / "bert")), "--bertscore-layers", "2"]
    beside = ["--lossless", "2", "auto", "--agreement"]
    assert eval.cli.main([*arguments, *bert, *beside, "--output", str(folder / "eval")]) == 0
    return folder / "eval"


def test_every_row_has_the_metrics_of_the_task_with_intervals_and_p_values(evaluated: Path) -> None:
    report = Report.load(evaluated / "report.json")
    full, fast, *_ = report.rows
    names = {"bleu", "nist", "rouge1", "rouge2", "rougeL", "cider", "bertscore", "slot_error_rate"}
    assert names == set(full.scores) - {"meteor"} == set(report.metrics) - {"meteor"}
    assert "meteor" in full.scores or "WordNet" in report.unavailable["meteor"]
    for row in report.rows:
        assert set(row.intervals) == set(row.scores)
        for name, (low, high) in row.intervals.items():
            assert low - 1e-9 <= row.scores[name] <= high + 1e-9 or low <= high
    assert full.p_values == {}
    assert set(fast.p_values) == set(fast.scores)
    assert report.metrics["bertscore"].endswith("layer 2")


def test_lossless_outputs_are_identical_to_full_depth_and_agreement_covers_every_token(evaluated: Path) -> None:
    report = Report.load(evaluated / "report.json")
    full, fast, *lossless = report.rows
    assert [row.label for row in report.rows] == ["1x", "3x", "lossless-2x", "lossless"]
    for row in lossless:
        assert row.scores == full.scores
        assert row.same_texts == full.same_texts == report.examples
        texts = [(evaluated / "predictions" / f"{label}.jsonl").read_text() for label in (row.label, "1x")]
        assert texts[0] == texts[1]
        for timing in row.timings:
            assert timing.acceptance_rate is None or 0 <= timing.acceptance_rate <= 1  # None: drafts did not pay
            assert timing.tokens_per_verification >= 1
    assert all(timing.tokens_per_verification is None for row in (full, fast) for timing in row.timings)
    checkpoint = load_checkpoint(report.checkpoint, None, torch.device("cpu"))
    lines = (evaluated / "predictions" / "1x.jsonl").read_text().splitlines()
    prompts = [checkpoint.tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    for row in (full, fast):  # in a batch as for single sequences
        system = SkipSystem(row.label, checkpoint, SkipSchedule.from_dict(row.schedule))
        alone = [system.decode([ids], report.max_new_tokens, agreement=True).agreeing for ids in prompts]
        for n, (agreeing, tokens) in enumerate(row.agreement):
            reached = [one[n] for one in alone if len(one) > n]
            assert (agreeing, tokens) == (sum(reached), len(reached))
    assert full.agreeing == 1
    assert f"lossless-2x: {report.examples} of {report.examples} outputs are identical to" in report.to_markdown()
    assert "| agreement |" in report.to_markdown()
    assert full.lossless_speedup is None
    assert fast.lossless_speedup > 0
    assert "with a row's schedule as the draft, on a sample: 3x " in report.to_markdown()


def test_the_prediction_files_contain_meanings_and_reproduce_the_scores(evaluated: Path, tmp_path: Path) -> None:
    lines = [json.loads(text) for text in (evaluated / "predictions" / "3x.jsonl").read_text().splitlines()]
    assert [line["meaning"] for line in lines] == MEANINGS
    assert "Xname" in lines[0]["prompt"]
    files = [str(evaluated / "predictions" / f"{speed}x.jsonl") for speed in (3, 1)]
    arguments = ["--predictions", files[0], "--against", files[1], "--task", "e2e"]
    assert eval.score.cli.main([*arguments, "--output", str(tmp_path / "scores.json")]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    full, fast, *_ = Report.load(evaluated / "report.json").rows
    for name in scores["metrics"]:
        assert scores[name] == pytest.approx(fast.scores[name])
        assert scores["against"][name] == pytest.approx(full.scores[name])
        assert scores["p_values"][name] == pytest.approx(fast.p_values[name])


def test_requested_metrics_replace_those_of_the_task(evaluated: Path, tmp_path: Path, capsys: Any) -> None:
    run, data = str(evaluated.parent / "run"), str(evaluated.parent / "data")
    arguments = ["--checkpoint", run, "--data-dir", data, "--speedup", "1", "--max-new-tokens", "2"]
    output = tmp_path / "eval"
    assert eval.cli.main([*arguments, "--metrics", "rouge2", "--output", str(output)]) == 0
    assert set(Report.load(output / "report.json").rows[0].scores) == {"rouge2"}
    assert "ROUGE-2" in capsys.readouterr().out
    without = Report.load(output / "report.json")
    assert without.rows[0].intervals.keys() == {"rouge2"}
    compare = ["--compare", f"other={output / 'report.json'}"]
    replace(Report.load(evaluated / "report.json"), task="viggo").save(tmp_path)
    for wrong, message in (
        (["--metrics", "blue"], "unknown metric 'blue'"),
        (["--bertscore-model", str(tmp_path / "nowhere")], "can't be loaded"),
        (compare, "--compare other: reports are compared by bleu, which that report lacks"),
        (["--compare", f"a={tmp_path / 'report.json'}"], "--compare a: that report is for the task viggo, not e2e"),
        (["--metrics", "bertscore"], "bertscore is among the metrics but has no model"),
    ):
        assert eval.cli.main([*arguments, *wrong, "--output", str(tmp_path / "none")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def report_of(predictions: dict[float, list[str]], evaluated: Path) -> Report:
    """A report with other predictions, twenty times as many, and figures of maximum width."""
    names = ["bleu", "nist", "rouge1", "rouge2", "rougeL", "cider", "bertscore", "slot_error_rate"]
    bert = BertModel(str(evaluated.parent / "bert"), 2)

    def scored(texts: list[str], against: Scores | None = None) -> Scores:
        return score(texts * 20, REFERENCES * 20, names, meanings=MEANINGS * 20, bert=bert, against=against)

    report = Report.load(evaluated / "report.json")
    full = scored(predictions[1])
    rows = []
    for speed, texts in predictions.items():
        scores = full if speed == 1 else scored(texts, full)
        row = replace(
            report.rows[1],
            label=f"{speed:g}x",
            num_layers=48,
            mean_layers=47.8,
            schedule=SkipSchedule(num_layers=48, max_layers=32, min_layers=16, horizon=32).to_dict(),
            scores=scores.values,
            intervals=scores.intervals,
            p_values=scores.p_values,
            prefill_seconds=123.0,
            decode_seconds=1234.5 / speed,
            wall_clock_speedup=speed,
            wall_clock_quartiles=(speed, speed),
            whole_speedup=Ratio(speed, speed, speed),
            speedup_target=speed,
            agreement=[],  # shown instead of BERTScore, which is rarely used
            cache_bytes=99_999_000_000,
        )
        rows.append(row)
    return replace(report, rows=rows)


def test_the_table_fits_and_marks_significant_differences_from_full_depth(evaluated: Path) -> None:
    right = [texts[0] for texts in REFERENCES]
    report = report_of({1: right, 2: right, 12.5: ["Aromi by a pub."] * 3}, evaluated)
    console = Console(width=160, record=True)
    table, by_batch_size = report.to_tables()
    console.print(table)
    lines = console.export_text().splitlines()
    console.print(by_batch_size)
    assert max(map(len, [*lines, *console.export_text().splitlines()])) <= 160
    head, full, same, worse = (
        next(line for line in lines if text in line) for text in ("system", " 1x ", " 2x ", "12.5x")
    )
    for label in ("BLEU", "NIST", "ROUGE-L", "BERTScore", "SER"):
        assert label in head
    assert "…" not in "".join(lines)
    assert (full.count("*"), same.count("*"), worse.count("*")) == (0, 0, 5)
    assert "100.00 [100.0, 100.0]" in full
    text = report.to_markdown()
    assert "| CIDEr |" in text
    assert text.count("\n| 12.5x |") == 3
    assert "* differs from the 1x row (p < 0.05" in text


def test_reports_without_intervals_can_be_read(evaluated: Path, tmp_path: Path) -> None:
    values = json.loads((evaluated / "report.json").read_text())
    for name in ("metrics", "unavailable"):
        del values[name]
    for row in values["rows"]:
        row["intervals"], row["p_values"] = {}, {}
    (tmp_path / "report.json").write_text(json.dumps(values))
    assert "BLEU" in Report.load(tmp_path / "report.json").to_markdown()
