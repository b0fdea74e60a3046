"""The Reddit TL;DR and CNN/DailyMail tasks: rows from files and from the Hub, held-out rows, and errors."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from data import load_task
from data.files import FORMATS, ending_of
from skipdecode import ConfigError

Rows = list[dict[str, Any]]
POST = "SUBREDDIT: r/tea\n\nTITLE: Cold, again\n\nPOST: I forget my tea.\n\nTITLE: is not a title here.\n\nTL;DR:"


def write_rows(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = FORMATS[ending_of(path) or ""]
    if kind == "Parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
        return
    stream = io.StringIO(newline="")
    if kind in ("CSV", "TSV"):
        writer = csv.DictWriter(stream, rows[0], delimiter="\t" if kind == "TSV" else ",")
        writer.writeheader()
        writer.writerows(rows)
    elif ".jsonl" in path.name:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        json.dump(rows, stream, indent=1)
    content = stream.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def articles(count: int) -> Rows:
    return [{"id": f"{n:x}", "article": f"Article {n}.", "highlights": f"First {n} .\nSecond ."} for n in range(count)]


def numbers(folder: Path, split: str, **options: Any) -> list[int]:
    task = load_task("cnndm", path=str(folder), **options)
    return [int(example.body.split()[1].rstrip(".")) for example in task.load(split)]  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", sorted(FORMATS))
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_file_format_gives_the_same_examples(suffix: str, split: Any, tmp_path: Path) -> None:
    stem = {"train": "train_sample", "validation": "dev", "test": "test-00000"}[split]
    # "NA" is ordinary text, text may contain quotes and commas, and brackets in a path are not a pattern.
    rows = [*articles(2), {"id": "x", "article": 'He said "no", twice.\n\nNo.', "highlights": " NA \n"}]
    folder = tmp_path / "data [v1]*"
    write_rows(folder / f"{stem}{suffix}", rows)
    examples = load_task("cnndm", path=str(folder)).load(split)
    assert [e.id for e in examples] == [f"cnndm-{split}-{n}" for n in range(3)]
    assert [e.prompt for e in examples] == [row["article"] + "\n\nTL;DR:" for row in rows]
    assert [e.references for e in examples] == [("First 0 .\nSecond .",), ("First 1 .\nSecond .",), ("NA",)]
    assert [e.targets for e in examples] == [(" First 0 .\nSecond .",), (" First 1 .\nSecond .",), (" NA",)]
    assert [e.body for e in examples] == [row["article"] for row in rows]


@pytest.mark.parametrize("suffix", sorted(FORMATS))
def test_both_copies_of_tldr_give_the_same_format(suffix: str, tmp_path: Path) -> None:
    parted_by_one = POST.replace("\n\nTITLE: Cold", "\nTITLE: Cold").replace("\n\nPOST", "\nPOST")
    rows = {
        "trl-lib": [{"prompt": POST, "completion": " My tea is cold."}],
        "CarperAI": [{"prompt": parted_by_one.replace("\n\nTL;DR", "\nTL;DR"), "label": "My tea is cold."}],
    }
    for name, content in rows.items():
        write_rows(tmp_path / name / f"valid{suffix}", content)
        (example,) = load_task("tldr", path=str(tmp_path / name)).load("validation")
        assert (example.prompt, example.instruction) == (POST, "\n\nTL;DR:")
        assert example.targets == (" My tea is cold.",)
        assert example.references == ("My tea is cold.",)


def test_splits_without_a_file_are_held_out_from_the_end_of_the_training_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", articles(10))
    expected = {"train": [0, 1, 2, 3], "validation": [4, 5, 6], "test": [7, 8, 9]}
    assert {split: numbers(tmp_path, split, holdout=3) for split in expected} == expected
    write_rows(tmp_path / "test.jsonl", articles(2))
    expected = {"train": [0, 1, 2, 3, 4, 5, 6], "validation": [7, 8, 9], "test": [0, 1]}
    assert {split: numbers(tmp_path, split, holdout=3) for split in expected} == expected
    write_rows(tmp_path / "dev.parquet", articles(1))
    expected = {"train": list(range(10)), "validation": [0], "test": [0, 1]}
    assert {split: numbers(tmp_path, split, holdout=3) for split in expected} == expected


def test_a_stream_reads_its_source_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def endless() -> Iterator[dict[str, str]]:
        for row in articles(100_000):
            read.append(len(read))
            if len(read) > 5:
                raise ConnectionError("the network went away")
            yield row

    asked: list[tuple[Any, ...]] = []

    def load_dataset(repository: str, **options: Any) -> Iterator[dict[str, str]]:
        asked.append((repository, options))
        return endless()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    stream = load_task("cnndm").stream("validation")
    assert [next(stream).body for _ in range(5)] == [f"Article {n}." for n in range(5)]
    assert len(read) == 5
    with pytest.raises(ConfigError, match=r"abisee/cnn_dailymail.*ConnectionError.*data\.path=FOLDER"):
        next(stream)
    # See the data set's page on the Hub.
    assert asked == [("abisee/cnn_dailymail", {"name": "3.0.0", "split": "validation", "streaming": True})]


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_a_bad_row_of_the_hub_is_named(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": POST, "completion": " ok"}, {"prompt": POST, "completion": " ok", column: None}]
    monkeypatch.setattr("datasets.load_dataset", lambda repository, **options: rows)
    with pytest.raises(ConfigError, match=f"trl-lib/tldr, test, row 2: {column} must not be empty"):
        load_task("tldr").load("test")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", "", "has no rows"),
        ("train.csv", "article,highlights\n", "has no rows"),
        ("train.csv", "article,summary\na,b\n", "row 1: no column 'highlights', only article, summary"),
        ("train.csv", "article,highlights\na,b\n ,b\n", "row 2: article must not be empty"),
        ("train.csv", "article,highlights\na,b\na,\n", "row 2: highlights must not be empty"),
        ("train.csv", "article,highlights\na,b\na\n", "row 2: highlights must not be empty"),
        ("train.csv", "article,highlights\na,b\na,b,c\n", "row 1 .more fields than the first line names"),
        ("train.csv", "article,article,highlights\na,b,c\n", "names the column 'article' 2 times"),
        ("train.csv", 'article,highlights\na,"b" c\n', "read as CSV"),
        ("train.csv", 'article,highlights\na,"b\n', "read as CSV"),
        ("train.csv", b"article,highlights\ncaf\xe9,b\n", r"read as CSV in utf-8.*data\.options\.encoding=utf-16"),
        ("train.jsonl", '{"article": "a", "highlights": "b"}\n{"article": "a"}\n', "row 2: no column 'highlights'"),
        ("train.jsonl", '{"article": "a", "highlights": "\\ud800"}\n', "read as JSON, near row 0"),
        ("train.jsonl", "3\n", "read as JSON, near row 0 .expected an object, got int"),
        ("train.jsonl", '{"article": "a", "highlights": 3}\n', "row 1: highlights is 3: it must be text"),
        ("train.jsonl", '{"article": "a", "highlights"\n', "read as JSON"),
        ("train.json", "[]", "has no rows|read as JSON"),
        ("train.parquet", "article", "read as Parquet"),
    ],
)
def test_the_error_for_a_bad_file_names_the_row_and_the_column(
    name: str, content: str | bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_task("cnndm", path=str(tmp_path)).load("train")
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_post_without_the_summary_instruction_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"prompt": "POST: what now?", "completion": " ok"}])
    with pytest.raises(ConfigError, match=r"row 1: prompt must end in TL;DR:, got 'POST: what now\?'"):
        load_task("tldr", path=str(tmp_path)).load("train")


def test_missing_splits_duplicate_files_and_bad_options_are_refused(tmp_path: Path) -> None:
    def message(split: Any, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_task("cnndm", **{"path": str(tmp_path), **options}).load(split)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such folder" in message("train", path=str(tmp_path / "nowhere"))
    assert "starts with train and ends in .csv" in message("train", holdout=3)
    write_rows(tmp_path / "train.csv", articles(6))
    missing = message("test")
    assert "add a file whose name starts with test" in missing
    assert "holdout" in missing
    for split in ("train", "validation", "test"):
        assert "holdout is 3: " in message(split, holdout=3)
        assert "has only 6 rows, too few to hold out 6" in message(split, holdout=3)
    assert "holdout is -1: it must be an integer of 0 or more" in message("train", holdout=-1)
    assert "holdout is True" in message("train", holdout=True)
    assert "unknown split 'dev'" in message("dev")
    write_rows(tmp_path / "training.parquet", articles(6))
    assert "train.csv and training.parquet: keep one" in message("train")


def test_real_articles_are_read_with_their_highlights(shared_data: Path) -> None:
    folder = shared_data / "cnndm"
    with (folder / "train_sample.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 100
    examples = load_task("cnndm", path=str(folder)).load("train")
    assert [e.prompt for e in examples] == [row["article"] + "\n\nTL;DR:" for row in rows]
    assert [e.references for e in examples] == [(row["highlights"].strip(),) for row in rows]
    assert len(load_task("cnndm", path=str(folder), holdout=10).load("train")) == 80
