"""Data files: formats, encodings, compression, shards, and arbitrary text in them."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data import load_task
from data.batches import encode_pairs
from data.files import FORMATS, ending_of
from data.task import Example
from data.vocabulary import train_tokenizer
from skipdecode import ConfigError

SEPARATORS = "\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # line separators of str.splitlines, and the tab of TSV
NAMED = {"prompt_column": "q", "completion_column": "a"}
Pairs = Sequence[tuple[str, str]]


def texts(encoding: str = "utf-8") -> st.SearchStrategy[str]:
    """Text that an encoding can represent, with many characters that end lines, fields or texts."""
    common = [sign for sign in f" \"',;\\[{{#\ufeff{SEPARATORS}" if sign.encode(encoding, "ignore")]
    signs = st.sampled_from(common) | st.characters(codec=encoding, exclude_characters="\0")
    return st.text(signs, max_size=8).filter(str.strip)


def write(file: Path, pairs: Pairs, encoding: str = "utf-8") -> None:
    kind = FORMATS[ending_of(file) or ""]
    rows = [{"q": prompt, "a": completion} for prompt, completion in pairs]
    if kind == "Parquet":
        datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in ("q", "a")}).to_parquet(file)
        return
    stream = io.StringIO(newline="")
    if kind == "JSON":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        stream.write("\n".join(lines) if ".jsonl" in file.name.lower() else f"[{', '.join(lines)}]")
    else:
        writer = csv.DictWriter(stream, ("q", "a"), delimiter="\t" if kind == "TSV" else ",")
        writer.writeheader()
        writer.writerows(rows)
    content = stream.getvalue().encode(encoding)
    file.write_bytes(gzip.compress(content, mtime=0) if file.suffix.lower() == ".gz" else content)


def read(folder: Path, split: Any = "train", **options: Any) -> list[Example]:
    return load_task("text", path=str(folder), **NAMED, **options).load(split)


def pairs_of(examples: Sequence[Example]) -> list[tuple[str, str]]:
    return [(example.prompt.removesuffix("\n"), example.references[0]) for example in examples]


@pytest.mark.parametrize("ending", sorted(FORMATS))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "cp1252", "gb18030"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_text_is_read_exactly_as_it_was_written(ending: str, encoding: str, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(texts(encoding), texts(encoding)), min_size=1, max_size=3))
    with TemporaryDirectory() as folder:
        write(Path(folder, f"train{ending}"), pairs, encoding)
        assert pairs_of(read(Path(folder), encoding=encoding)) == pairs


@cache
def tokenizers() -> list[PreTrainedTokenizerBase]:
    """Byte-level tokenizers, as in GPT-2, OPT and Qwen, and one that prepends a space, as in Llama 2 and Mistral."""
    vocabulary = ["<unk>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({word: n for n, word in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    blanks = Tokenizer(model)
    blanks.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    blanks.decoder = decoders.Sequence(parts)
    trained = train_tokenizer(load_task("departures", train_size=50).stream("train"), 320, 128)
    return [trained, PreTrainedTokenizerFast(tokenizer_object=blanks, eos_token="</s>", unk_token="<unk>")]


@pytest.mark.parametrize("number", [0, 1])
@settings(max_examples=150, deadline=None)
@given(
    completion=texts().filter(lambda text: "▁" not in text),
    instruction=st.sampled_from(["", " =>", "=>\n", "\n\nAnswer:"]),
    strip=st.booleans(),
)
def test_training_decoding_and_scoring_use_the_same_text(
    number: int, completion: str, instruction: str, strip: bool
) -> None:
    tokenizer = tokenizers()[number]
    assume(not any(token in completion for token in tokenizer.get_added_vocab()))  # decoding would remove them
    with TemporaryDirectory() as folder:
        write(Path(folder, "train.jsonl"), [(" q\n", completion)])
        task = load_task("text", path=folder, **NAMED, instruction=instruction, strip=strip)
        (example,) = task.load("train")
    assert example.prompt == ("q" if strip else " q\n") + (instruction or "\n")
    assert example.references == (completion.strip() if strip else completion,)
    columns = encode_pairs(tokenizer, [example], max_prompt_tokens=64, max_completion_tokens=64)
    decoded = tokenizer.decode(columns["completion_ids"][0], skip_special_tokens=True)
    assert task.restore(example, str(decoded)) == example.references[0]


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000-of-00003.parquet", "train-00001-of-00003.parquet", "train-00002-of-00003.parquet"],
        ["train-00000-of-00002-0123456789abcdef.parquet", "train-00001-of-00002-fedcba9876543210.parquet"],
        ["train-00001-of-00002.jsonl", "train-00002-of-00002.jsonl"],
        ["train-0-of-1.csv"],
        [f"train-{number}-of-12.tsv.gz" for number in range(12)],
        ["Train-00000-of-00002.JSON.GZ", "Train-00001-of-00002.JSON.GZ"],
    ],
)
def test_shards_are_read_in_numerical_order(names: list[str], tmp_path: Path) -> None:
    pairs = [(f"question {n}", f"answer {n}") for n in range(2 * len(names) + 1)]
    for n in reversed(range(len(names))):
        write(tmp_path / names[n], pairs[2 * n : None if n == len(names) - 1 else 2 * n + 2])
    assert pairs_of(read(tmp_path)) == pairs
    held_out = {split: pairs_of(read(tmp_path, split, holdout=1)) for split in ("train", "validation", "test")}
    assert held_out == {"train": pairs[:-2], "validation": pairs[-2:-1], "test": pairs[-1:]}
    task = load_task("text", path=str(tmp_path), **NAMED)
    assert [file.name for file in task.files("train")] == names


def test_single_shards_may_be_empty_but_not_all_of_them(tmp_path: Path) -> None:
    for n, pairs in enumerate(([], [("question", "answer")], [])):
        write(tmp_path / f"train-0000{n}-of-00003.parquet", pairs)
    assert pairs_of(read(tmp_path)) == [("question", "answer")]
    write(tmp_path / "train-00001-of-00003.parquet", [])
    with pytest.raises(ConfigError, match=r"train-00000-of-00003\.parquet has no rows, and neither do the other"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00002.csv"], r"train-00000-of-00002\.csv is one of 2 shards; missing shards: 1,.*00001; add"),
        (["train-00001-of-00003.csv"], r"is one of 3 shards; missing shards: 2, the first is number 00000"),
        (["train-00000-of-00003.csv", "train-00002-of-00003.csv"], "missing shards: 1, .*number 00001"),
        (["train-00000-of-99999999999999.csv"], "missing shards: 99999999999998,"),
        (["train-00003-of-00002.csv"], "3 isn't a valid number of one of 2 shards"),
        (["train-00000-of-00000.csv"], "0 isn't a valid number of one of 0 shards"),
        (["train-00000-of-00002.csv", "train-00001-of-00003.csv"], ".*-of-00002.csv and .*-of-00003.csv: keep one"),
        (["train-00000-of-00002.csv", "train-00000-of-00002.tsv"], "two files for one split"),
        (["train-00000-of-00002.csv", "train-0-of-00002.csv"], "two files for one split"),
        (["train.csv", "train-00000-of-00001.csv"], "two files for one split"),
        (["train.csv", "train.csv.gz"], r"train\.csv and train\.csv\.gz: keep one; shards must be named"),
        (["train_1.csv", "train_2.csv"], r"train_1\.csv and train_2\.csv: keep one; shards"),
        (["train.csv", "train-00000-of-00001.csv", "train-00001-of-00002.csv"], "two files for one split"),
    ],
)
def test_missing_duplicate_and_unrelated_shards_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / name, [("question", "answer")])
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_index_of_a_pandas_frame_is_ignored(tmp_path: Path) -> None:
    frame = pd.DataFrame({"q": ["a", "b", "c", "d"], "a": ["1", "2", "3", "4"]})[lambda rows: rows["a"] != "3"]
    frame.to_parquet(tmp_path / "train.parquet")
    datasets.Dataset.from_pandas(frame).to_json(tmp_path / "validation.jsonl")
    frame.to_csv(tmp_path / "test.csv", index_label="__index_level_0__")
    assert "__index_level_0__" in (tmp_path / "validation.jsonl").read_text()
    for split in ("train", "validation", "test"):
        assert pairs_of(read(tmp_path, split)) == [("a", "1"), ("b", "2"), ("d", "4")]


def test_other_columns_may_have_any_type(tmp_path: Path) -> None:
    frame = pd.DataFrame({"q": pd.Categorical(["a", "b"]), "a": ["1", "2"], "when": pd.Timestamp.now(), "n": [[1], []]})
    frame.to_parquet(tmp_path / "train.parquet")
    (tmp_path / "test.csv").write_text("n,q,a,,\n1,a,1,,\nx,b,2,,\n")
    assert pairs_of(read(tmp_path)) == pairs_of(read(tmp_path, "test")) == [("a", "1"), ("b", "2")]


def test_a_field_longer_than_the_csv_modules_limit_is_read(tmp_path: Path) -> None:
    pairs = [("word " * 100_000 + ".", "answer")]
    write(tmp_path / "train.csv", pairs)
    assert pairs_of(read(tmp_path)) == pairs


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("train.csv", "q,a\né,b\n".encode("utf-16"), {}, r"read as CSV in utf-8.*data\.options\.encoding=utf-16"),
        ("train.csv", "q,a\né,b\n".encode("cp1252"), {}, r"read as CSV in utf-8.*set its encoding"),
        ("train.csv", "q,a\nc,b\n".encode("utf-16-le"), {}, "NUL characters.*utf-16"),
        ("train.jsonl", '{"q": "a"}'.encode("utf-16-be"), {}, "NUL characters.*utf-16"),
        ("train.csv", b"q,a\nc,b\n", {"encoding": "utf-16"}, "read as CSV, near row 0 .*BOM"),
        ("train.csv", b"q,a\n\x81,b\n", {"encoding": "cp1252"}, "read as CSV in cp1252"),
        ("train.csv.gz", b"q,a\nc,b\n", {}, "read as CSV, near row 0 .Not a gzipped file"),
        ("train.csv.gz", gzip.compress(b"q,a\nc,b\n", mtime=0)[:-9], {}, "read as CSV.*end-of-stream"),
        ("train.tsv", b"q,a\nc,b\n", {}, "row 1: no column 'a', only q,a"),
        ("train.csv", b"q\ta\nc\tb\n", {}, r"row 1: no column 'a', only q\ta"),
        ("train.json", b'{\n "q": "a"\n}', {}, "expected a list of objects, or one object per line"),
        ("train.json", b'{"q": {"0": "b"}, "a": {"0": "%b"}}' % (b"x" * 5000), {}, r"row 1: a is \{'0': 'x.*: it must"),
        ("train.xlsx", b"q,a\n", {}, r"ends in \.csv, \.tsv, \.jsonl, \.json .also followed by \.gz. or \.parquet"),
        ("train.parquet.gz", b"", {}, r"has no file in .*\.parquet"),
        ("train.csv", b"q,a\n", {"encoding": "utf-99"}, "encoding is 'utf-99': it must be an encoding that Python"),
        ("train.csv", b"q,a\n", {"encoding": "hex"}, "encoding is 'hex'"),
        ("train.csv", b"q,a\n", {"encoding": "utf\0"}, "encoding is 'utf"),
        ("train.csv", b"q,a\n", {"encoding": 1252}, "encoding is 1252: Input should be a valid string"),
        ("train.csv", b"q,a\n", {"strip": "no"}, "strip is 'no': Input should be a valid boolean"),
    ],
)
def test_an_unreadable_file_gives_a_one_line_error(
    name: str, content: bytes, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_encoding_without_local_files_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoding is 'cp1252'.*data\.path isn't set"):
        load_task("cnndm", encoding="cp1252")
