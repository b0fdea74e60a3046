"""Tasks: their examples, prompts and references, and the tokenised training rows and batches made of them."""

from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from data.chat import Chat
from data.cnndm import CNNDailyMail
from data.departures import Departures
from data.e2e import E2E
from data.own import OwnText
from data.task import Example, Split, Task
from data.tldr import TLDR
from data.viggo import ViGGO
from data.webnlg import WebNLG
from skipdecode.errors import ConfigError, unknown

__all__ = ["TASKS", "Example", "Split", "Task", "load_task"]

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (E2E, WebNLG, ViGGO, TLDR, CNNDailyMail, OwnText, Chat, Departures)
}


def load_task(name: str, /, **options: Any) -> Task:
    """Make a task by its name, with the options that aren't None.

    Raises ConfigError for an unknown name or option, and for a value of the wrong type.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    given = {key: value for key, value in options.items() if value is not None}
    types = {key: kind for key, kind in get_type_hints(TASKS[name].__init__).items() if key != "return"}
    for key, value in given.items():
        if key not in types:
            raise unknown(f"option of the task {name!r}", key, types)
        try:
            TypeAdapter(types[key], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(f"{key} is {value!r}: {reason} (an option of the task {name!r})") from error
    if given.get("path") == "":
        raise ConfigError("data.path is empty (--data-dir in the evaluation): set it to a folder")
    return TASKS[name](**given)
