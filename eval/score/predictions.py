"""Files of predictions: JSON lines with `id`, `prompt`, `prediction` and `references`."""

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
    """One line: the prediction for a prompt, and its references.

    Attributes:
        where: file and line, for messages.
        meaning: the meaning representation, where the line has this field.
        part: the part of the test set, where the line has this field.
    """

    where: str
    id: str
    prompt: str
    prediction: str
    references: tuple[str, ...]
    meaning: str = ""
    part: str = ""


def read_predictions(path: Path) -> dict[str, Prediction]:
    """The lines of a file by id, in their order.

    Raises ConfigError with the file and line number for a line that isn't JSON, has missing or invalid fields, has no
    references or repeats an id.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise ConfigError(f"{path} has no lines")
    found: dict[str, Prediction] = {}
    # Not splitlines(), which also splits at characters such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        read = _read(f"{path}, line {number}", line)
        if read.id in found:
            raise ConfigError(f"{read.where}: the id {read.id!r} was used before, in {found[read.id].where}")
        found[read.id] = read
    return found


def write_predictions(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write JSON lines, atomically."""
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def matched(found: Mapping[str, Prediction], other: Mapping[str, Prediction]) -> list[Prediction]:
    """The lines of `other` in the order of `found`. Raises ConfigError where the items differ."""
    for one, two in ((found, other), (other, found)):
        for name, line in one.items():
            if name not in two:
                file = next(iter(two.values())).where.rpartition(", ")[0]
                raise ConfigError(
                    f"{line.where}: {file} has no prediction for {name!r}: both files must have the same items"
                )
    for name, line in other.items():
        own = found[name]
        if line.references != own.references:
            raise ConfigError(f"{line.where}: the references of {name!r} differ from those in {own.where}")
        for field, here, there in (("meaning", line.meaning, own.meaning), ("part", line.part, own.part)):
            if here and there and here != there:
                raise ConfigError(f"{line.where}: the {field} of {name!r} differs from that in {own.where}")
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
            raise ConfigError(f"{where}: {name} is {values[name]!r}: it must be a string")
    references = values["references"]
    if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
        raise ConfigError(f"{where}: references is {references!r}: it must be a list of strings")
    if not any(text.strip() for text in references):
        raise ConfigError(f"{where}: {values['id']!r} has no references")
    for text in (values["id"], values["prompt"], values["prediction"], *references):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{where}: {text!r} contains an unpaired surrogate, which can't be encoded")
    part = values.get("part", "")
    if part and not part.isidentifier():
        raise ConfigError(f"{where}: part is {part!r}: it must be an identifier, such as seen")
    return Prediction(
        where=where,
        id=values["id"],
        prompt=values["prompt"],
        prediction=values["prediction"],
        references=tuple(references),
        meaning=values.get("meaning", ""),
        part=part,
    )
