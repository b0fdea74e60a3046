"""Files of predictions: a JSON object a line, with `id`, `prompt`, `prediction` and `references`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.errors import ConfigError
from skipdecode.files import write_atomically

FIELDS = ("id", "prompt", "prediction", "references")


@dataclass(frozen=True)
class Prediction:
    """One line: what a system wrote for a prompt, and every text that it is compared with.

    Attributes:
        where: file and line, for messages.
        meaning: what the text must state, where the line says it in a field of its own.
        part: the part of the test set that it is of, likewise.
    """

    where: str
    id: str
    prompt: str
    prediction: str
    references: tuple[str, ...]
    meaning: str = ""
    part: str = ""


def read_predictions(path: Path) -> dict[str, Prediction]:
    """The lines of a file by their ids, in their order.

    Raises ConfigError, with the file and the line, for one that isn't JSON, lacks a field or has one of the wrong kind,
    has no references or repeats an id.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise ConfigError(f"{path} has no lines")
    found: dict[str, Prediction] = {}
    # Not splitlines(), which also parts texts at characters such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        read = _read(f"{path}, line {number}", line)
        if read.id in found:
            raise ConfigError(f"{read.where}: the id {read.id!r} is that of another line, {found[read.id].where}")
        found[read.id] = read
    return found


def write_predictions(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines, whole or not at all."""
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def matched(found: Mapping[str, Prediction], other: Mapping[str, Prediction]) -> list[Prediction]:
    """The lines of `other` in the order of `found`. Raises ConfigError where the two aren't of the same items."""
    for one, two in ((found, other), (other, found)):
        for name, line in one.items():
            if name not in two:
                file = next(iter(two.values())).where.rpartition(", ")[0]
                raise ConfigError(f"{line.where}: {file} has no prediction of {name!r}: both must be of the same items")
    for name, line in other.items():
        own = found[name]
        if line.references != own.references:
            raise ConfigError(f"{line.where}: the references of {name!r} aren't those of {own.where}")
        for field, here, there in (("meaning", line.meaning, own.meaning), ("part", line.part, own.part)):
            if here and there and here != there:
                raise ConfigError(f"{line.where}: the {field} of {name!r} isn't that of {own.where}")
    return [other[name] for name in found]


def _read(where: str, line: str) -> Prediction:
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected an object with {', '.join(FIELDS)}")
    for name in FIELDS:
        if name not in values:
            raise ConfigError(f"{where}: the field {name!r} is missing; a line has {', '.join(FIELDS)}")
    if isinstance(values["id"], int) and not isinstance(values["id"], bool):
        values["id"] = str(values["id"])
    for name in ("id", "prompt", "prediction", "meaning", "part"):
        if not isinstance(values.get(name, ""), str):
            raise ConfigError(f"{where}: {name} is {values[name]!r}: it must be text")
    references = values["references"]
    if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
        raise ConfigError(f"{where}: references is {references!r}: it must be a list of texts")
    if not any(text.strip() for text in references):
        raise ConfigError(f"{where}: {values['id']!r} has no references")
    for text in (values["id"], values["prompt"], values["prediction"], *references):
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ConfigError(f"{where}: {text!r} holds half of a character, which can't be written")
    part = values.get("part", "")
    if part and not part.isidentifier():
        raise ConfigError(f"{where}: part is {part!r}: it must be a name of letters, such as seen")
    return Prediction(
        where=where,
        id=values["id"],
        prompt=values["prompt"],
        prediction=values["prediction"],
        references=tuple(references),
        meaning=values.get("meaning", ""),
        part=part,
    )
