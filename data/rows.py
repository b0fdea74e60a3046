"""Tokenised training rows on disk: made once for the same data, tokenizer and limits, then found again."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import multiprocess  # what the datasets library starts its processes with
import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from data import load_task
from data.columns import encode_pairs
from data.options import task_options_of
from data.task import Example, Split, Task
from skipdecode.errors import ConfigError, first_line

FEATURES = datasets.Features(
    {
        "prompt_ids": datasets.Sequence(datasets.Value("int32")),
        "completion_ids": datasets.Sequence(datasets.Value("int32")),
        "length": datasets.Value("int32"),
        "prompt_cut": datasets.Value("bool"),
        "completion_cut": datasets.Value("bool"),
    }
)
_TEXTS = datasets.Features(
    {
        "id": datasets.Value("string"),
        "body": datasets.Value("string"),
        "instruction": datasets.Value("string"),
        "targets": datasets.Sequence(datasets.Value("string")),
    }
)


@dataclass(frozen=True)
class Encoded:
    """Training rows, memory-mapped, and what there is to know of them all.

    Attributes:
        rows: a `datasets.Dataset` with `prompt_ids`, `completion_ids` (with the end token) and `length`.
        longest_prompt, longest_completion: tokens.
        prompts_cut, completions_cut: how many lost tokens to the limits.
    """

    rows: datasets.Dataset
    longest_prompt: int
    longest_completion: int
    prompts_cut: int
    completions_cut: int


def encode_task(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    split: Split = "train",
    *,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    limit: int | None = None,
    num_proc: int | None = None,
    cache_dir: str | None = None,
) -> Encoded:
    """The rows of a split, or of its first `limit` examples, in the order of the task.

    They are written below `cache_dir` (None: the folder of the datasets library) by `num_proc` processes, or found
    there where the same rows were made before. Raises what the task and `encode_pairs` raise.
    """
    key = _key(task, split, tokenizer, (max_prompt_tokens, max_completion_tokens, limit))
    cache = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "skipdecode"
    folder = cache / key
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.cache_dir is {cache_dir!r}: no folder can be made there ({error})") from error
        with (
            tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished,
            _bars_on_terminals(),
            _spawned(),
        ):
            texts = _write_texts(task, split, limit, unfinished)
            rows = texts.map(
                partial(
                    _encode_batch,
                    tokenizer=tokenizer,
                    max_prompt_tokens=max_prompt_tokens,
                    max_completion_tokens=max_completion_tokens,
                ),
                batched=True,
                num_proc=num_proc if num_proc != 1 else None,
                remove_columns=texts.column_names,
                features=FEATURES,
                new_fingerprint=key,  # the library's own hashes the tokenizer, whose state changes as it is used
                desc="tokenising",
            )
            rows.save_to_disk(os.path.join(unfinished, "rows"))
            _move(Path(unfinished) / "rows", folder)
    try:
        return _measure(datasets.load_from_disk(str(folder)))
    except (OSError, ValueError) as error:  # Arrow's are ValueErrors
        raise ConfigError(
            f"{folder} holds rows that can't be read ({first_line(error)}): remove it, and they are made again"
        ) from error


def _write_texts(task: Task, split: Split, limit: int | None, folder: str) -> datasets.Dataset:
    """The examples as they are read, on disk."""

    def texts() -> Iterator[dict[str, Any]]:
        for example in islice(task.stream(split), limit):
            yield {
                "id": example.id,
                "body": example.body,
                "instruction": example.instruction,
                "targets": list(example.targets),
            }

    try:
        return datasets.Dataset.from_generator(texts, features=_TEXTS, cache_dir=folder)
    except datasets.exceptions.DatasetGenerationError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None  # what the task said; the wrapping says nothing


def _encode_batch(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    max_completion_tokens: int,
) -> dict[str, list[Any]]:
    examples = [
        Example(name, body + instruction, (), tuple(targets), instruction=instruction)
        for name, body, instruction, targets in zip(*(batch[column] for column in _TEXTS), strict=True)
    ]
    return encode_pairs(
        tokenizer, examples, max_prompt_tokens=max_prompt_tokens, max_completion_tokens=max_completion_tokens
    )


def _measure(rows: datasets.Dataset) -> Encoded:
    """Read the lengths and the cuts, as Arrow, and leave the columns that training needs."""
    longest = [pc.max(pc.list_value_length(rows.data[name])).as_py() for name in ("prompt_ids", "completion_ids")]
    cut = [pc.sum(rows.data[name]).as_py() for name in ("prompt_cut", "completion_cut")]
    return Encoded(rows.remove_columns(["prompt_cut", "completion_cut"]), *longest, *cut)


def training_rows(
    name: str,
    data_dir: str | None,
    option_pairs: Sequence[str],
    max_prompt_tokens: int | None,
    tokenizer: PreTrainedTokenizerBase,
) -> datasets.Dataset:
    """The tokenised training split of a task; None: the task's default. Raises what the task raises."""
    task = load_task(name, path=data_dir, **task_options_of(option_pairs))
    return encode_task(
        task,
        tokenizer,
        "train",
        max_prompt_tokens=max_prompt_tokens or task.max_prompt_tokens,
        max_completion_tokens=task.max_new_tokens,
    ).rows


def row_lengths(rows: datasets.Dataset) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """Tokens of every prompt and of every completion, each [rows]."""
    batches = list(rows.with_format("arrow").iter(batch_size=10_000))
    prompts, completions = (
        np.concatenate([pc.list_value_length(batch[column]).to_numpy() for batch in batches])
        for column in ("prompt_ids", "completion_ids")
    )
    return prompts, completions


def _key(task: Task, split: Split, tokenizer: PreTrainedTokenizerBase, limits: tuple[int | None, ...]) -> str:
    """Names the rows by all that they depend on; an attribute that JSON can't hold goes in as its repr."""
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in task.files(split)]
    values = {
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "attributes": vars(task),
        "split": split,
        "files": files,
        "tokenizer": _tokenizer_hash(tokenizer),
        "limits": limits,
        # Other code may make other rows of the same data.
        "code": [_hash(file.read_bytes()) for file in sorted(Path(__file__).parent.glob("*.py"))],
    }
    return _hash(json.dumps(values, sort_keys=True, default=repr).encode())[:32]


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of the files that it saves: what is common to all kinds of tokenizers."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _hash(*(file.read_bytes() for file in sorted(Path(folder).iterdir())))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _move(source: Path, target: Path) -> None:
    """Rename a finished folder into place, unless another process has put the same there in the meantime."""
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(source)


@contextmanager
def _spawned() -> Iterator[None]:
    """Processes of the datasets library start as new interpreters.

    A fork copies the locks that other threads hold (torch's, Arrow's, W&B's) and may wait on one for ever.
    """
    before = multiprocess.get_start_method(allow_none=True)
    multiprocess.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocess.set_start_method(before, force=True)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Progress bars of the datasets library only where someone sees them move."""
    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()
