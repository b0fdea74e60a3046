"""Bad inputs and faults: each must end in one line that names what is wrong, with the right status, and nothing lost.

    python -m pytest -n 2 tests/release/test_bad_input.py      # or -k weights, of bad_inputs.yaml and faults.yaml

Every one is a process of its own in a fresh copy of a folder of runs, checkpoints and data, forked off after the heavy
imports, so that it takes as long as the command itself. Nothing is reached over the network: the Hub and W&B are
addresses at which nobody answers.
"""

import fnmatch
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from bad_input_environment import SCRATCH
from bad_input_world import DAMAGE, make_world
from forked_commands import Forked
from small_runs import SMALL

Contents = dict[str, str | bytes | None]
ARGUMENTS = {
    "SMALL": [*SMALL, "train.max_steps=4"],
    "TEXT": ["--recipe", "text.yaml", *(word for word in SMALL if not word.startswith("data.")), "train.max_steps=4"],
    "output.dir=LONG": ["output.dir=" + "x" * 300],
    "LONGPROMPT": ["word " * 500],
}


@dataclass(frozen=True)
class Trial:
    """A command, what happens around it, and what must come of it; the fields are those that faults.yaml explains."""

    area: str
    command: str
    says: str
    status: int | list[int] = 2
    before: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    stdin: str = ""
    stdout: str | None = None
    disk: int | None = None
    signal: str | None = None
    when: str | float = 0.0
    beside: str | None = None
    until: str = ""
    seconds: float = 60.0
    changes: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    fresh: bool = False
    one_line: bool = False  # nothing but the line, and not even the output folder: a bad input


def read_trials() -> list[Trial]:
    """The cases of both files."""
    inputs, faults = (
        yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        for name in ("bad_inputs.yaml", "faults.yaml")
    )
    return [
        Trial(
            area,
            f"{values['command']} {words}".strip(),
            says,
            status=values.get("status", 2),
            changes=changes,
            one_line=True,
        )
        for area, values in inputs.items()
        for words, says, *changes in values["inputs"]
    ] + [Trial("fault", **values) for values in faults]


@pytest.fixture(scope="session")
def world() -> Iterator[Path]:
    try:
        make_world(SCRATCH / "world")
        yield SCRATCH / "world"
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.mark.parametrize("trial", read_trials(), ids=lambda trial: f"{trial.area}: {trial.command} {trial.before}")
def test_it_ends_in_a_line_that_names_it_and_nothing_is_lost(trial: Trial, world: Path) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        folder = shutil.copytree(world, Path(scratch, "world"), symlinks=True)
        for line in trial.before:
            name, *arguments = shlex.split(line)
            DAMAGE[name](folder, *arguments)
        before = contents(folder)
        main, complaints = run(trial, folder)
        complaints += changes(trial, before, contents(folder))
        complaints += [f"{name} isn't there" for name in trial.leaves if not there(folder, name)]
    assert not complaints, main.stderr or main.stdout


def run(trial: Trial, folder: Path) -> tuple[Forked, list[str]]:
    """Run it to its end, or until its time is over; says what is wrong, a line each."""
    running: list[Forked] = []

    def wait(due: Callable[[], bool], until: float) -> None:
        while not due() and time.monotonic() < until:
            time.sleep(0.01)
            for each in running:
                each.ended()  # reads what it says

    if trial.beside is not None:
        running.append(Forked(words_of(trial.beside), folder))
        wait(lambda: there(folder, trial.until), time.monotonic() + trial.seconds)
    env = {key: "0123456789abcdef" * 2 + "01234567" if v == "KEY" else v for key, v in trial.env.items()}
    main = Forked(
        words_of(trial.command),
        folder,
        env=env,
        stdin=trial.stdin,
        stdout=trial.stdout,
        disk=trial.disk,
        fresh=trial.fresh,
    )
    start, when = time.monotonic(), trial.when
    if trial.signal is not None:
        if isinstance(when, str):
            wait(lambda: main.ended() or there(folder, when), start + trial.seconds)
        else:
            wait(main.ended, start + when)
        if not main.ended():
            main.signal(trial.signal)
    wait(main.ended, start + trial.seconds)
    found = [f"the one beside it ended: {each.stderr[-200:]}" for each in running if each.ended()]
    status = main.status
    for each in (main, *running):
        each.end()
    return main, [*found, *complaints_of(trial, status, main)]


def complaints_of(trial: Trial, status: int | None, main: Forked) -> Iterator[str]:
    allowed = trial.status if isinstance(trial.status, list) else [trial.status]
    if status is None:
        yield f"not at its end after {trial.seconds:g} s"
    elif status not in allowed:
        yield f"status {status}, not {' or '.join(map(str, allowed))}"
    if "Traceback" in main.stderr + main.stdout or "Exception ignored" in main.stderr:
        yield "a traceback"
    lines = [line for line in main.stderr.splitlines() if line.strip() and "%|" not in line]  # a bar that fills up
    last = " ".join(lines) if allowed == [0] else (lines or [""])[-1]
    if not re.search(trial.says, last, re.IGNORECASE):
        yield f"doesn't name {trial.says}"
    if trial.one_line:
        by_argparse = lines and lines[0].startswith("usage: ") and re.match(r".*: error: ", lines[-1])
        # transformers may warn of a call of the library that is refused after it.
        if len(lines) != 1 and not by_argparse and trial.area != "library":
            yield f"{len(lines)} lines"


def changes(trial: Trial, before: Contents, after: Contents) -> list[str]:
    """What is new, gone or changed and should not be."""
    free = [*trial.changes, *([] if trial.one_line else ["new", "new.json", "new.html", "outputs"])]
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    lost = [n for n in changed if not any(fnmatch.fnmatch(n, p) or n.startswith(f"{p}/") for p in free)]
    return [f"{'new' if n not in before else 'gone' if n not in after else 'changed'}: {n}" for n in lost]


def words_of(command: str) -> list[str]:
    """A command of the tables as its words."""
    name, _, code = command.partition(" ")
    if name in ("library", "request"):
        return [name, code]
    words = shlex.split(command.replace("\\udcff", "\udcff"))
    parts = [part for word in words for part in ARGUMENTS.get(word, [word])]
    if any(part.startswith(("model.name_or_path=", "model.tokenizer=")) for part in parts):
        parts = [part for part in parts if not part.startswith("model.vocab_size=")]  # no tokenizer is trained
    return parts


def there(folder: Path, pattern: str) -> bool:
    return next(folder.glob(pattern), None) is not None


def contents(folder: Path) -> Contents:
    """Every file and folder, with what tells whether it changed."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
        if not path.name.endswith(".lock")
    }
