"""The task for a user's own data: its examples, its errors, and a complete run."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from small_runs import train_small_on

import eval.cli
from data import Example, load_task
from eval.score.scores import score
from skipdecode import ConfigError

CSV = 'question,answer,more\nWhat is 2 + 2?,4,x\n"Who, me?",007,y\n'


def folder_with(tmp_path: Path, **files: str) -> str:
    for stem, content in files.items():
        (tmp_path / (stem + (".jsonl" if content.startswith("{") else ".csv"))).write_text(content, encoding="utf-8")
    return str(tmp_path)


def load(folder: str, split: Any = "train", **options: Any) -> list[Example]:
    named = {"prompt_column": "question", "completion_column": "answer", **options}
    return load_task("text", path=folder, **named).load(split)


def test_a_row_gives_its_prompt_and_completion_unchanged(tmp_path: Path) -> None:
    first, second = load(folder_with(tmp_path, train=CSV))
    assert (first.id, first.prompt, first.targets) == ("text-train-0", "What is 2 + 2?\n", ("4",))
    assert (second.prompt, second.targets, second.references) == ("Who, me?\n", ("007",), ("007",))
    assert first.instruction == ""


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_text_that_looks_like_a_date_stays_text(suffix: str, tmp_path: Path) -> None:
    rows = [{"question": "When?", "answer": "2026-01-02"}, {"question": "And then?", "answer": "2026-01-03T04:05:06"}]
    lines = json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"train.{suffix}").write_text(lines)
    assert [example.references for example in load(str(tmp_path))] == [("2026-01-02",), ("2026-01-03T04:05:06",)]


def test_an_instruction_follows_the_prompt_which_may_be_truncated_before_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, train=CSV)
    example = load(folder, instruction="\n\nAnswer:")[0]
    assert (example.prompt, example.targets) == ("What is 2 + 2?\n\nAnswer:", (" 4",))
    assert (example.body, example.instruction, example.references) == ("What is 2 + 2?", "\n\nAnswer:", ("4",))
    assert load(folder, instruction=" =>\n")[0].targets == ("4",)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_test_rows_with_the_same_prompt_form_one_example(suffix: str, tmp_path: Path) -> None:
    rows = [("a", "1"), ("b", "2"), ("a", "3"), ("a", "1"), ("c", "4"), ("b", "5")]
    table = datasets.Dataset.from_list([{"question": q, "answer": a} for q, a in rows])
    for split in ("train", "test"):
        file = tmp_path / f"{split}.{suffix}"
        {"csv": table.to_csv, "jsonl": table.to_json, "parquet": table.to_parquet}[suffix](str(file))
    examples = load(str(tmp_path), "test")
    assert [example.id for example in examples] == ["text-test-0", "text-test-1", "text-test-2"]
    assert [(e.prompt, e.references) for e in examples] == [("a\n", ("1", "3")), ("b\n", ("2", "5")), ("c\n", ("4",))]
    assert len(load(str(tmp_path), "train")) == 6


def test_references_may_come_from_a_separate_column(tmp_path: Path) -> None:
    line = json.dumps({"question": "a", "answer": "1", "all": ["one", " 1 "]})
    folder = folder_with(tmp_path, test=line + "\n", train='question,answer,all\na,1,"[""one"", ""1""]"\nb,2,[two]\n')
    (example,) = load(folder, "test", references_column="all")
    assert (example.references, example.targets) == (("one", " 1 "), ("1",))
    assert load(folder, "test", references_column="all", strip=True)[0].references == ("one", "1")
    assert [e.references for e in load(folder, references_column="all")] == [("one", "1"), ("[two]",)]


def test_splits_without_a_file_are_held_out_of_the_training_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, train="question,answer\n" + "".join(f"q{n},a{n}\n" for n in range(6)))
    sizes = {split: len(load(folder, split, holdout=2)) for split in ("train", "validation", "test")}
    assert sizes == {"train": 2, "validation": 2, "test": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_column": "Question"}, r"train\.csv, row 1: no column 'Question', only question, answer, more"),
        ({"completion_column": "reply"}, r"train\.csv, row 1: no column 'reply', only question, answer, more"),
        ({"references_column": "refs"}, r"train\.csv, row 1: no column 'refs', only question, answer, more"),
        ({"prompt_column": None}, r"prompt_column is missing.*data\.options\.prompt_column=question"),
        ({"completion_column": ""}, r"completion_column is missing.*data\.options\.completion_column=answer"),
        ({"holdout": -1}, "holdout is -1"),
        ({"column": "a"}, "task 'text'.*column"),
    ],
)
def test_the_error_names_a_missing_column(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder_with(tmp_path, train=CSV), **options)
    assert "\n" not in str(caught.value)


def test_the_error_names_a_bad_row_or_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, train="question,answer\na,b\n,c\n", test="question,answer\na\n")
    with pytest.raises(ConfigError, match=r"train\.csv, row 2: question must not be empty"):
        load(folder)
    with pytest.raises(ConfigError, match=r"test\.csv, row 1: answer must not be empty"):
        load(folder, "test")
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        load_task("text", prompt_column="question", completion_column="answer")
    (tmp_path / "other").mkdir()
    lines = '{"question": "a", "answer": "b", "all": [1]}\n'
    with pytest.raises(ConfigError, match=r"row 1: all is \[1\]: it must be a list of texts"):
        load(folder_with(tmp_path / "other", train=lines), references_column="all")


@pytest.mark.parametrize("around", ["    ", "\t", "\n\n", "\u2028", " \r\n\x85"])
def test_whitespace_around_texts_changes_no_score(around: str) -> None:
    predictions = ["the cat sat on a mat", "return x", ""]
    references = [["the cat sat on the mat"], ["return y"], ["z"]]
    metrics = ["bleu", "nist", "rouge1", "rouge2", "rougeL", "rougeLsum", "cider"]
    spaced = [f"{around}{text}{around}" for text in predictions]
    kept = [[f"{around}{text}{around}" for text in texts] for texts in references]
    assert score(spaced, kept, metrics).values == score(predictions, references, metrics).values


def test_a_users_csv_is_trained_on_and_evaluated(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data").mkdir()
    rows = [f"what rhymes with {word}?,{word[:-1]}og rhymes" for word in ("cat", "dot", "fit", "hut", "log", "man") * 4]
    test = ["what rhymes with cat?,  cog rhymes", 'what rhymes with cat?,"a\u2028bat\u0085does\n"']
    splits = {split: "\n".join(["question,answer", *lines]) for split, lines in (("train", rows), ("test", test))}
    folder = folder_with(tmp_path / "data", **splits)
    named = ("data.options.prompt_column=question", "data.options.completion_column=answer")
    limits = ("data.max_prompt_tokens=64", "data.max_completion_tokens=32", "schedule.horizon=16")
    run = train_small_on(f"{{task: text, path: {folder}}}", tmp_path / "run", *named, *limits, "train.max_steps=3")
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(run), "--data-dir", folder, "--speedup", "2", "--max-new-tokens", "16"]
    assert eval.cli.main([*arguments, "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    assert (report["task"], report["examples"]) == ("text", 1)
    assert {"nist", "rougeL"} <= set(report["rows"][1]["scores"])  # the answers are too short for BLEU
    (line,) = [json.loads(text) for text in (output / "predictions" / "2x.jsonl").read_text().split("\n")[:-1]]
    assert line["references"] == ["  cog rhymes", "a\u2028bat\u0085does\n"]
