"""Tokenised rows: truncation, and a disk cache that is renewed when anything that rows depend on changes."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data.rows
from data import Example, Split, Task, load_task
from data.batches import encode_pairs, encode_prompts
from data.rows import Encoded, encode_task
from data.vocabulary import train_tokenizer
from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_tokenizer

LIMITS = {"max_prompt_tokens": 40, "max_completion_tokens": 12}
ROWS = [{"article": f"Article {n}: " + "so much " * n, "highlights": f"It was {n} ."} for n in range(20)]
TEXTS = [Example(str(n), row["article"] + "\n\nTL;DR:", (row["highlights"],)) for n, row in enumerate(ROWS)]
words = st.text("ab Ärz.\n日", min_size=1, max_size=40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 320, max_length=64)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of examples in each tokenised batch."""
    counts: list[int] = []

    def counting(tokenizer: Any, examples: Any, **limits: Any) -> Any:
        counts.append(len(examples))
        return encode_pairs(tokenizer, examples, **limits)

    monkeypatch.setattr(data.rows, "encode_pairs", counting)
    return counts


def encode(folder: Path, tokenizer: Any, options: dict[str, Any] | None = None, **changes: Any) -> Encoded:
    task = load_task("cnndm", path=str(folder / "data"), **(options or {}))
    return encode_task(task, tokenizer, **{**LIMITS, "cache_dir": str(folder / "cache"), **changes})


TRAINED = train_tokenizer(TEXTS, 320, max_length=64)


@given(body=words, instruction=words, limit=st.integers(1, 60))
def test_a_truncated_prompt_is_the_start_of_its_body_and_its_whole_instruction(
    body: str, instruction: str, limit: int
) -> None:
    example = Example("x", body + instruction, ("",), instruction=instruction)
    whole = TRAINED(example.prompt)["input_ids"]
    start = TRAINED(body)["input_ids"]
    end = TRAINED(instruction, add_special_tokens=False)["input_ids"]
    if len(end) >= limit and len(whole) > limit:  # no token of the body would remain
        with pytest.raises(ConfigError, match=f"the prompt of x has {len(whole)} tokens, at most {limit}"):
            encode_prompts(TRAINED, [example], limit, "shorten it")
        return
    (prompt,) = encode_prompts(TRAINED, [example], limit, "shorten it")
    assert prompt.cut == (len(whole) > limit)
    assert prompt.ids == (start[: limit - len(end)] + end if prompt.cut else whole)
    assert len(prompt.ids) <= limit
    # Prompts that are short enough stay unchanged.
    assert encode_prompts(TRAINED, [example], 1000, "", cut_to=len(whole))[0].ids == whole
    assert encode_prompts(TRAINED, [example], 1000, "", cut_to=limit) == [prompt]


def test_a_prompt_has_the_same_tokens_in_training_and_decoding() -> None:
    """Llama 3's and Qwen's tokenizers join a full stop with the following line breaks, where the instruction starts."""
    example = Example("x", "It rains.\n\nTL;DR:", ("",), instruction="\n\nTL;DR:")
    tokens = ["?", "It", "rains", "TL", "DR", " ", ".\n\n", ".", "\n\n", ";", ":"]
    joined = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, "?"))
    joined.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\s\w]+\n*|\w+|\s+"), "isolated")
    joining = PreTrainedTokenizerFast(tokenizer_object=joined)
    (prompt,) = encode_prompts(joining, [example], 64, "")
    assert prompt.ids == joining(example.prompt)["input_ids"]
    assert prompt.ids != joining(example.body)["input_ids"] + joining(example.instruction)["input_ids"]


def test_a_prompt_without_instruction_is_never_truncated() -> None:
    example = Example("x", "a long prompt\n", ("",))
    length = len(TRAINED(example.prompt)["input_ids"])
    assert encode_prompts(TRAINED, [example], length, "", cut_to=2)[0].ids == TRAINED(example.prompt)["input_ids"]
    with pytest.raises(ConfigError, match=f"has {length} tokens, at most {length - 1} are allowed: shorten it"):
        encode_prompts(TRAINED, [example], length - 1, "shorten it")
    with pytest.raises(ValueError, match="must end in its instruction"):
        Example("x", "a prompt", ("",), instruction="another")


def test_opts_start_token_occurs_only_at_the_start_of_a_row(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "opt"))
    task = load_task("cnndm", path=str(shared_data / "cnndm"))
    limits = {"max_prompt_tokens": task.max_prompt_tokens, "max_completion_tokens": task.max_new_tokens}
    encoded = encode_task(task, tokenizer, cache_dir=str(tmp_path), **limits)
    assert len(encoded.rows) == 100
    assert (encoded.longest_prompt, encoded.longest_completion) == (896, 128)
    # The lengths are counted separately for articles, highlights and the six tokens of the instruction.
    examples = task.load("train")
    assert encoded.prompts_cut == sum(len(tokenizer(e.body)["input_ids"]) + 6 > 896 for e in examples) > 30
    assert encoded.completions_cut == sum(len(tokenizer(e.targets[0])["input_ids"]) > 128 for e in examples) > 0
    ending = tokenizer("\n\nTL;DR:", add_special_tokens=False)["input_ids"]
    for row, example in zip(encoded.rows, examples, strict=True):
        assert row["prompt_ids"][0] == 2
        assert 2 not in row["prompt_ids"][1:]
        assert 2 not in row["completion_ids"][:-1]
        assert row["prompt_ids"][-6:] == ending
        assert row["length"] == len(row["prompt_ids"]) + len(row["completion_ids"])
        assert example.prompt.startswith(tokenizer.decode(row["prompt_ids"][1:-6]).rstrip("\ufffd"))
        assert example.targets[0].startswith(tokenizer.decode(row["completion_ids"], skip_special_tokens=True))


@pytest.mark.parametrize("name", ["state.json", "data-00000-of-00001.arrow"])
def test_the_error_names_cached_rows_that_cannot_be_read(folder: Path, tokenizer: Any, name: str) -> None:
    encode(folder, tokenizer)
    (kept,) = (folder / "cache" / "skipdecode").iterdir()
    (kept / name).write_bytes((kept / name).read_bytes()[:-40])
    with pytest.raises(ConfigError, match=f"{kept.name} can't be read .*: delete the folder"):
        encode(folder, tokenizer)


def test_rows_follow_the_order_of_the_examples(folder: Path, tokenizer: Any) -> None:
    encoded = encode(folder, tokenizer)
    columns = encode_pairs(tokenizer, load_task("cnndm", path=str(folder / "data")).load("train"), **LIMITS)
    assert encoded.rows.column_names == ["prompt_ids", "completion_ids", "length"]
    for name in encoded.rows.column_names:
        assert list(encoded.rows[name]) == columns[name]
    assert encoded.longest_prompt == max(map(len, columns["prompt_ids"])) == 40
    assert encoded.longest_completion == max(map(len, columns["completion_ids"]))
    assert 0 < encoded.prompts_cut == sum(columns["prompt_cut"]) < 20
    assert encoded.completions_cut == sum(columns["completion_cut"])


def test_given_completions_take_the_place_of_all_targets_of_their_examples(folder: Path, tokenizer: Any) -> None:
    examples = load_task("cnndm", path=str(folder / "data")).load("train")
    given = {example.id: f" {number} is short ." for number, example in enumerate(reversed(examples))}
    encoded = encode(folder, tokenizer, completions=given)
    replaced = [replace(example, targets=(f" {19 - number} is short .",)) for number, example in enumerate(examples)]
    columns = encode_pairs(tokenizer, replaced, **LIMITS)
    assert examples[0].targets[0].startswith(" "), "a separator, which the given text needs once"
    for name in encoded.rows.column_names:
        assert list(encoded.rows[name]) == columns[name]


def test_a_second_run_reads_the_cached_rows(folder: Path, tokenizer: Any, tokenised: list[int]) -> None:
    first = encode(folder, tokenizer)
    assert sum(tokenised) == 20
    # The same task and tokenizer as other objects, and another number of processes.
    again = encode(folder, train_tokenizer(TEXTS, 320, max_length=64), num_proc=2)
    assert sum(tokenised) == 20
    assert again.rows[:] == first.rows[:]
    assert (again.prompts_cut, again.completions_cut) == (first.prompts_cut, first.completions_cut)
    assert not list((folder / "cache" / "skipdecode").glob("unfinished-*"))


@pytest.mark.parametrize(
    "change",
    [
        {"max_prompt_tokens": 41},
        {"max_completion_tokens": 13},
        {"limit": 19},
        {"completions": {f"cnndm-train-{n}": f"{n} ." for n in range(20)}},
        {"options": {"holdout": 1}},
        {"vocabulary": 280},
        {"bos": True},
        {"touch": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changing_anything_that_rows_depend_on_tokenises_again(
    change: dict[str, Any], folder: Path, tokenizer: Any, tokenised: list[int]
) -> None:
    encode(folder, tokenizer)
    before = len(tokenised)
    if change.pop("touch", False):
        file = folder / "data" / "train.jsonl"
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    if change.pop("bos", False):
        tokenizer.eos_token = "<unk>"
    if size := change.pop("vocabulary", None):
        tokenizer = train_tokenizer(TEXTS, size, max_length=64)
    encode(folder, tokenizer, **change)
    assert len(tokenised) > before


def test_adding_a_training_file_recomputes_held_out_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = "mr,ref\n" + "".join(f"name[{name}],It is {name}.\n" for name in ("Aromi", "Zizzi", "Cotto"))
    (tmp_path / "devset.csv").write_text(rows)
    task = load_task("e2e", path=str(tmp_path), holdout=1)
    limits = {**LIMITS, "cache_dir": str(tmp_path / "cache")}
    assert len(encode_task(task, tokenizer, "validation", **limits).rows) == 1
    (tmp_path / "trainset.csv").write_text(rows)
    assert len(encode_task(task, tokenizer, "validation", **limits).rows) == 3


def test_two_processes_make_the_same_rows_as_one(folder: Path, tokenizer: Any) -> None:
    one = encode(folder, tokenizer)
    two = encode(folder, tokenizer, cache_dir=str(folder / "other"), num_proc=2)
    assert two.rows[:] == one.rows[:]
    assert (two.prompts_cut, two.longest_prompt) == (one.prompts_cut, one.longest_prompt)


@pytest.mark.release  # its processes take 10 s for their imports
def test_an_error_in_a_tokenising_process_is_reported_and_caches_nothing(folder: Path, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the prompt of cnndm-train-0 has \d+ tokens, at most 5 are allowed: raise"):
        encode(folder, tokenizer, cache_dir=str(folder / "other"), num_proc=2, max_prompt_tokens=5)
    assert list((folder / "other" / "skipdecode").iterdir()) == []


class Bottomless(Task):
    """A task that fails when more than three examples are read."""

    name: ClassVar[str] = "bottomless"

    def stream(self, split: Split) -> Iterator[Example]:
        yield from TEXTS[:3]
        raise ConfigError("there is no bottom")


def test_only_the_rows_within_the_limit_are_read(tokenizer: Any, tmp_path: Path) -> None:
    where: dict[str, Any] = {"cache_dir": str(tmp_path), "max_completion_tokens": 12}
    encoded = encode_task(Bottomless(), tokenizer, limit=3, max_prompt_tokens=99, **where)
    assert [row["prompt_ids"] for row in encoded.rows] == [tokenizer(e.prompt)["input_ids"] for e in TEXTS[:3]]
    # An error of the source is passed on unchanged, and nothing is cached.
    with pytest.raises(ConfigError, match=r"^there is no bottom$"):
        encode_task(Bottomless(), tokenizer, limit=4, max_prompt_tokens=99, **where)
    assert len(list((tmp_path / "skipdecode").iterdir())) == 1


def test_a_tokenizer_trained_on_a_stream_equals_one_trained_on_a_list(tmp_path: Path) -> None:
    task = load_task("departures", train_size=50)
    whole = train_tokenizer(task.load("train"), 320, max_length=64)
    streamed = train_tokenizer(task.stream("train"), 320, max_length=64)
    assert streamed.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    with pytest.raises(ConfigError, match=r"^there is no bottom$"):
        train_tokenizer(Bottomless().stream("train"), 320, max_length=64)


def test_a_cache_folder_that_cannot_be_created_is_refused(folder: Path, tokenizer: Any) -> None:
    (folder / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"data\.cache_dir is '.*cache': a folder can't be created there"):
        encode(folder, tokenizer)
