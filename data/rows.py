"""A disk cache of tokenised training rows, keyed by data, tokenizer and limits."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from data.batches import encode_pairs
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
        "chat": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Encoded:
    """Memory-mapped training rows, and statistics of them.

    Attributes:
        rows: a `datasets.Dataset` with `prompt_ids`, `completion_ids` (with the end token) and `length`.
        longest_prompt: length of the longest prompt, in tokens.
        longest_completion: length of the longest completion, in tokens.
        prompts_cut: number of truncated prompts.
        completions_cut: number of truncated completions.
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
    end_tokens: Sequence[int] = (),
    limit: int | None = None,
    completions: Mapping[str, str] | None = None,
    num_proc: int | None = None,
    cache_dir: str | None = None,
) -> Encoded:
    """Tokenise a split, or read its rows from the cache if they were made before.

    Args:
        task: the task.
        tokenizer: the model's tokenizer.
        split: the split.
        max_prompt_tokens: maximum prompt length, as in `encode_pairs`.
        max_completion_tokens: maximum completion length, as in `encode_pairs`.
        end_tokens: the tokens that end generation, as in `encode_pairs`.
        limit: number of examples to use, from the first; None: all.
        completions: example's id -> the text of its only row, in place of its targets; None: the targets.
        num_proc: number of processes; None: one.
        cache_dir: folder of the cache; None: the cache of the datasets library.

    Returns:
        The rows in the order of the task's examples.

    Raises:
        ConfigError: as the task and `encode_pairs` do, and for a cache that can't be read or written.
    """
    limits = (max_prompt_tokens, max_completion_tokens, limit, *end_tokens)
    key = _key(task, split, tokenizer, limits, completions)
    cache = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "skipdecode"
    folder = cache / key
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.cache_dir is {cache_dir!r}: a folder can't be created there ({error})") from error
        with (
            tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished,
            _bars_on_terminals(),
            _spawned(),
        ):
            texts = _write_texts(task, split, limit, completions, unfinished)
            rows = texts.map(
                partial(
                    _encode_batch,
                    tokenizer=tokenizer,
                    max_prompt_tokens=max_prompt_tokens,
                    max_completion_tokens=max_completion_tokens,
                    end_tokens=end_tokens,
                ),
                batched=True,
                num_proc=num_proc if num_proc != 1 else None,
                remove_columns=texts.column_names,
                features=FEATURES,
                new_fingerprint=key,  # the default would hash the tokenizer, whose state changes in use
                desc="tokenising",
            )
            rows.save_to_disk(os.path.join(unfinished, "rows"))
            _move(Path(unfinished) / "rows", folder)
    try:
        return _measure(datasets.load_from_disk(str(folder)))
    except (OSError, ValueError) as error:  # Arrow raises ValueErrors
        raise ConfigError(
            f"the cached rows in {folder} can't be read ({first_line(error)}): delete the folder to tokenise them again"
        ) from error


def _write_texts(
    task: Task, split: Split, limit: int | None, completions: Mapping[str, str] | None, folder: str
) -> datasets.Dataset:
    """Write the task's examples to disk, untokenised, as they are read."""

    def texts() -> Iterator[dict[str, Any]]:
        for example in islice(task.stream(split), limit):
            yield {
                "id": example.id,
                "body": example.body,
                "instruction": example.instruction,
                "targets": _targets(example, completions),
                "chat": example.chat,
            }

    try:
        return datasets.Dataset.from_generator(texts, features=_TEXTS, cache_dir=folder)
    except datasets.exceptions.DatasetGenerationError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None  # the task's own error, without the library's wrapper


def _targets(example: Example, completions: Mapping[str, str] | None) -> list[str]:
    """The texts of the example's rows. A given one starts with the whitespace of the targets, which is a separator."""
    if completions is None:
        return list(example.targets)
    target = example.targets[0]
    return [target[: len(target) - len(target.lstrip())] + completions[example.id].lstrip()]


def _encode_batch(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    max_completion_tokens: int,
    end_tokens: Sequence[int],
) -> dict[str, list[Any]]:
    examples = [
        Example(name, body + instruction, (), tuple(targets), instruction=instruction, chat=chat)
        for name, body, instruction, targets, chat in zip(*(batch[column] for column in _TEXTS), strict=True)
    ]
    return encode_pairs(
        tokenizer,
        examples,
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=max_completion_tokens,
        end_tokens=end_tokens,
    )


def _measure(rows: datasets.Dataset) -> Encoded:
    """Compute the statistics, and keep only the columns that training needs."""
    longest = [pc.max(pc.list_value_length(rows.data[name])).as_py() for name in ("prompt_ids", "completion_ids")]
    cut = [pc.sum(rows.data[name]).as_py() for name in ("prompt_cut", "completion_cut")]
    return Encoded(rows.remove_columns(["prompt_cut", "completion_cut"]), *longest, *cut)


def training_rows(
    name: str,
    data_dir: str | None,
    option_pairs: Sequence[str],
    max_prompt_tokens: int | None,
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: Sequence[int],
) -> datasets.Dataset:
    """The tokenised training split of a task, for commands.

    Args:
        name: the task's name.
        data_dir: folder of the task's files; None: the Hub, or nothing for a built-in task.
        option_pairs: arguments of `--task-option`.
        max_prompt_tokens: maximum prompt length; None: the task's default.
        tokenizer: the model's tokenizer.
        end_tokens: the tokens that end generation.

    Raises:
        ConfigError: as the task does.
    """
    task = load_task(name, path=data_dir, **task_options_of(option_pairs))
    return encode_task(
        task,
        tokenizer,
        "train",
        max_prompt_tokens=max_prompt_tokens or task.max_prompt_tokens,
        max_completion_tokens=task.max_new_tokens,
        end_tokens=end_tokens,
    ).rows


def row_lengths(rows: datasets.Dataset) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    """The lengths of all prompts and of all completions in tokens, each [rows]."""
    batches = list(rows.with_format("arrow").iter(batch_size=10_000))
    prompts, completions = (
        np.concatenate([pc.list_value_length(batch[column]).to_numpy() for batch in batches])
        for column in ("prompt_ids", "completion_ids")
    )
    return prompts, completions


def _key(
    task: Task,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    limits: tuple[int | None, ...],
    completions: Mapping[str, str] | None,
) -> str:
    """A hash of everything on which the rows depend; attributes that JSON can't represent are hashed by their repr."""
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in task.files(split)]
    values = {
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "attributes": vars(task),
        "split": split,
        "files": files,
        "tokenizer": _tokenizer_hash(tokenizer),
        "limits": limits,
        "completions": completions,
        # Another version of this code may make other rows of the same data.
        "code": [_hash(file.read_bytes()) for file in sorted(Path(__file__).parent.glob("*.py"))],
    }
    return _hash(json.dumps(values, sort_keys=True, default=repr).encode())[:32]


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the files that the tokenizer saves, which all kinds of tokenizers have in common."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _hash(*(file.read_bytes() for file in sorted(Path(folder).iterdir())))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _move(source: Path, target: Path) -> None:
    """Move a finished folder into place, unless another process has created it in the meantime."""
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(source)


@contextmanager
def _spawned() -> Iterator[None]:
    """Make the datasets library spawn its processes instead of forking them.

    A fork copies locks that other threads hold (of torch, Arrow or W&B), and may wait for one forever.
    """
    before = multiprocess.get_start_method(allow_none=True)
    multiprocess.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocess.set_start_method(before, force=True)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Turn off the progress bars of the datasets library where stderr isn't a terminal."""
    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()
