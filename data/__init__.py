"""Tasks: where examples come from, how they read, and how they lie in a batch."""

from typing import Any

from data.cnndm import CNNDailyMail
from data.departures import Departures
from data.e2e import E2E
from data.own import OwnText
from data.task import Example, Split, Task
from data.tldr import TLDR
from skipdecode.errors import ConfigError, unknown

__all__ = ["TASKS", "Example", "Split", "Task", "load_task"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (E2E, TLDR, CNNDailyMail, OwnText, Departures)}


def load_task(name: str, **options: Any) -> Task:
    """The task of a name, made with the options that aren't None. Raises ConfigError for an unknown name or option."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return TASKS[name](**given)
    except TypeError as error:
        raise ConfigError(f"task {name!r}: {error}") from error
