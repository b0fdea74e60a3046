"""Tokenised rows as prompts and completions, and the collator that lays them out in batches."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skipdecode.errors import ConfigError
from skipdecode.training.batch_layout import IGNORED, lay_out

_MASKS = ("completion_mask", "assistant_masks")  # columns of TRL until 1.15; later versions make `labels` of them
_COLUMNS = ("prompt_ids", "completion_ids")


class PromptCompletionCollator:
    """Collates rows into batches in which every completion starts at the same position.

    Prompts are padded on the left and completions on the right, so that each layer runs on a prefix of the positions
    (`skip_layers`). A row has either `prompt_ids` and `completion_ids`, or, as TRL tokenises its datasets, `input_ids`
    with `labels` (-100 where no token is trained), `completion_mask` or `assistant_masks`. Such a row may train one
    answer; `split_answers` makes several rows of one with several answers.

    Args:
        pad_token: the id that fills prompts and completions. It is masked, so any id of the vocabulary will do.
    """

    def __init__(self, pad_token: int) -> None:
        self.pad_token = pad_token

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Lay out a batch.

        Returns:
            As `skipdecode.training.batch_layout.lay_out`.

        Raises:
            ConfigError: for a row of another form, or with several answers; the message names the row.
        """
        examples: list[Mapping[str, Any]] = []
        for number, row in enumerate(rows):
            name = f"row {number} of the batch"
            found = [dict(row)] if row.keys() >= set(_COLUMNS) else list(answers(row, name))
            if len(found) != 1:
                raise ConfigError(
                    f"{name} has {len(found)} separate runs of trained tokens, but must have one completion; "
                    "skipdecode.training.split_answers makes one row of each"
                )
            examples += found
        return lay_out([e["prompt_ids"] for e in examples], [e["completion_ids"] for e in examples], self.pad_token)


def answers(row: Mapping[str, Any], name: str) -> Iterator[dict[str, list[int]]]:
    """Yield an example for each run of trained tokens in a row, with everything before it as its prompt.

    What follows the last run isn't trained and, since attention is causal, changes nothing.

    Args:
        row: `input_ids` with `labels`, `completion_mask` or `assistant_masks`; where both masks are there, both apply.
        name: the row's name in messages.

    Raises:
        ConfigError: for a row of another form, and for a first token that is trained, which has no prompt.
    """
    if "input_ids" not in row or not row.keys() & {"labels", *_MASKS}:
        raise ConfigError(
            f"{name} has the columns {', '.join(sorted(row))}: expected prompt_ids and completion_ids, or input_ids "
            "with labels, completion_mask or assistant_masks, which TRL makes of prompt-completion datasets and, with "
            "assistant_only_loss=True, of conversations"
        )
    ids = list(row["input_ids"])
    if "labels" in row:
        trained = [label != IGNORED for label in row["labels"]]
        if any(label != token for label, token, one in zip(row["labels"], ids, trained, strict=True) if one):
            raise ConfigError(f"{name} has labels that differ from its input_ids: only -100 may stand in their place")
    else:
        trained = [all(bits) for bits in zip(*(row[mask] for mask in _MASKS if mask in row), strict=True)]
    end = 0
    for one, run in itertools.groupby(trained):
        start, end = end, end + len(list(run))
        if not one:
            continue
        if start == 0:
            raise ConfigError(
                f"{name} trains its first token, so it has no prompt: use a prompt-completion dataset, or "
                "conversations with assistant_only_loss=True"
            )
        yield {"prompt_ids": ids[:start], "completion_ids": ids[start:end]}


def split_answers(dataset: Any, *, max_length: int | None = None, keep_end: bool = False) -> Any:
    """Make one row with `prompt_ids`, `completion_ids` and `length` of each answer of a tokenised dataset.

    A conversation with several answers becomes as many rows, each answer behind its history, so the loss is that of the
    conversation: it is divided by the number of trained tokens. Rows without a trained token are left out.

    Args:
        dataset: a dataset of the `datasets` library, or a sequence of rows; for the rows see `answers`. One with
            `prompt_ids` and `completion_ids` is returned unchanged.
        max_length: the length in tokens that rows are truncated to before they are split; None: they aren't.
        keep_end: whether truncation keeps the end of a row instead of its start.

    Returns:
        A dataset of the same kind, or a list.

    Raises:
        ConfigError: as `answers` does; the message names the row. Also where there is no row left.
    """
    settings: dict[str, Any] = {"max_length": max_length, "keep_end": keep_end}
    if hasattr(dataset, "map"):
        columns = dataset.column_names or list(next(iter(dataset)))
        if set(columns) >= set(_COLUMNS):
            return dataset
        found = dataset.map(_split_batch, batched=True, with_indices=True, remove_columns=columns, fn_kwargs=settings)
    else:
        rows = [dataset[number] for number in range(len(dataset))]
        if all(row.keys() >= set(_COLUMNS) for row in rows):
            return dataset
        found = [e for number, row in enumerate(rows) for e in _truncated_answers(row, number, **settings)]
    if hasattr(found, "__len__") and not len(found):
        raise ConfigError("the dataset has no row with a trained token")
    return found


def _split_batch(batch: Mapping[str, list[Any]], numbers: Sequence[int], **settings: Any) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    found = [e for number, row in zip(numbers, rows, strict=True) for e in _truncated_answers(row, number, **settings)]
    return {name: [example[name] for example in found] for name in (*_COLUMNS, "length")}


def _truncated_answers(
    row: Mapping[str, Any], number: int, *, max_length: int | None, keep_end: bool
) -> Iterator[dict[str, Any]]:
    kept = slice(None) if max_length is None else slice(-max_length, None) if keep_end else slice(max_length)
    cut = {name: row[name][kept] for name in ("input_ids", "labels", *_MASKS) if name in row}
    for example in answers(cut or row, f"row {number}"):
        yield {**example, "length": len(example["prompt_ids"]) + len(example["completion_ids"])}
