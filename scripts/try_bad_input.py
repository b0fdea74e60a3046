"""Bad inputs and faults: each must end in one line that names what is wrong, with the right status, and nothing lost.

    python scripts/try_bad_input.py                   # those of scripts/bad_inputs.yaml and scripts/faults.yaml
    python scripts/try_bad_input.py --only weights --jobs 2

Every one is a process of its own in a fresh copy of a folder of runs, checkpoints and data, forked off after the heavy
imports, so that it takes as long as the command itself. Prints those that fail, with what they said; exit status 1
then, else 0. Nothing is reached over the network: the Hub and W&B are addresses at which nobody answers.
"""

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import yaml
from bad_input_environment import SCRATCH
from bad_input_world import DAMAGE, make_world
from forked_commands import Forked
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from small_runs import SMALL

ROOT = Path(__file__).resolve().parent.parent
WORLD = SCRATCH / "world"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="those whose area or command holds it")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at a time (default 1)")
    parser.add_argument("--verbose", action="store_true", help="what each of them said, also where it is right")
    options = parser.parse_args()
    trials = [trial for trial in read_trials() if options.only in f"{trial.area}: {trial.command} {trial.before}"]
    try:
        make_world(WORLD)
        failed = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("bad inputs and faults", total=len(trials))
            for trial, complaints, said in run_all(trials, options.jobs):
                progress.advance(bar)
                failed += bool(complaints)
                if complaints or options.verbose:
                    lines = [f"{trial.area}: {trial.command}", *(f"  before: {line}" for line in trial.before)]
                    lines += ["  ! " + "; ".join(complaints)] if complaints else []
                    lines += [f"  | {line[:300]}" for line in said.splitlines()[-6:]]
                    print(*lines, sep="\n", flush=True)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    faults = sum(not trial.one_line for trial in trials)
    print(f"{len(trials) - faults} bad inputs, {faults} faults: {failed} failed")
    return int(failed > 0)


def read_trials() -> list[Trial]:
    """The cases of both files."""
    inputs = yaml.safe_load((ROOT / "scripts" / "bad_inputs.yaml").read_text(encoding="utf-8"))
    faults = yaml.safe_load((ROOT / "scripts" / "faults.yaml").read_text(encoding="utf-8"))
    return [
        Trial(area, f"{values['command']} {words}".strip(), says, changes=changes, one_line=True)
        for area, values in inputs.items()
        for words, says, *changes in values["inputs"]
    ] + [Trial("fault", **values) for values in faults]


def run_all(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Trial, list[str], str]]:
    """Run them, `jobs` at a time; yields each with what is wrong with it and what it said."""
    waiting, running = list(enumerate(trials)), []
    while waiting or running:
        while waiting and len(running) < jobs:
            number, trial = waiting.pop(0)
            running.append(Running(trial, SCRATCH / str(number)))
        time.sleep(0.01)
        for each in [each for each in running if each.ended()]:
            running.remove(each)
            yield each.trial, each.complaints(), each.said
            shutil.rmtree(each.folder, ignore_errors=True)


class Running:
    """One trial on its way."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.folder = trial, folder
        shutil.copytree(WORLD, folder, symlinks=True)
        for line in trial.before:
            name, *arguments = shlex.split(line)
            DAMAGE[name](folder, *arguments)
        self._before = contents(folder)
        self._signalled = False
        self._main: Forked | None = None
        self._beside = Forked(words_of(trial.beside), folder) if trial.beside is not None else None
        if self._beside is None:
            self._start()
        self._began = time.monotonic()

    def _start(self) -> None:
        trial = self.trial
        env = {key: "0123456789abcdef" * 2 + "01234567" if v == "KEY" else v for key, v in trial.env.items()}
        words = words_of(trial.command)
        self._main = Forked(
            words, self.folder, env=env, stdin=trial.stdin, stdout=trial.stdout, disk=trial.disk, fresh=trial.fresh
        )
        self._began = time.monotonic()

    def ended(self) -> bool:
        """Do what is due, and say whether it has ended."""
        trial, passed = self.trial, time.monotonic() - self._began
        if self._main is None:
            assert self._beside is not None
            self._beside.ended()  # reads what it says
            if there(self.folder, trial.until) or passed > trial.seconds:
                self._start()
            return False
        if trial.signal is not None and not self._signalled:
            due = there(self.folder, trial.when) if isinstance(trial.when, str) else passed >= trial.when
            if due and not self._main.ended():
                self._main.signal(trial.signal)
                self._signalled = True
        if self._main.ended() or passed > trial.seconds:
            return True
        if self._beside is not None:
            self._beside.ended()
        return False

    @property
    def said(self) -> str:
        assert self._main is not None
        return self._main.stderr or self._main.stdout

    def complaints(self) -> list[str]:
        """End what still runs, and say what is wrong, a line each."""
        trial, main = self.trial, self._main
        assert main is not None
        found = []
        status = main.status
        main.end()
        if self._beside is not None:
            if self._beside.ended():
                found.append(f"the one beside it ended: {self._beside.stderr[-200:]}")
            self._beside.end()
        allowed = trial.status if isinstance(trial.status, list) else [trial.status]
        if status is None:
            found.append(f"not at its end after {trial.seconds:g} s")
        elif status not in allowed:
            found.append(f"status {status}, not {' or '.join(map(str, allowed))}")
        if "Traceback" in main.stderr + main.stdout or "Exception ignored" in main.stderr:
            found.append("a traceback")
        lines = [line for line in main.stderr.splitlines() if line.strip() and "%|" not in line]  # a bar that fills up
        last = " ".join(lines) if allowed == [0] else (lines or [""])[-1]
        if not re.search(trial.says, last, re.IGNORECASE):
            found.append(f"doesn't name {trial.says}")
        if trial.one_line:
            by_argparse = lines and lines[0].startswith("usage: ") and re.match(r".*: error: ", lines[-1])
            # transformers may warn of a call of the library that is refused after it.
            if len(lines) != 1 and not by_argparse and trial.area != "library":
                found.append(f"{len(lines)} lines")
        found += self._changes()
        found += [f"{name} isn't there" for name in trial.leaves if not there(self.folder, name)]
        return found

    def _changes(self) -> list[str]:
        trial, after = self.trial, contents(self.folder)
        free = [*trial.changes, *([] if trial.one_line else ["new", "new.json", "new.html", "outputs"])]
        changed = [name for name in {*self._before, *after} if self._before.get(name) != after.get(name)]
        lost = [n for n in changed if not any(fnmatch.fnmatch(n, p) or n.startswith(f"{p}/") for p in free)]
        if not lost:
            return []
        before = self._before
        how = [f"{'new' if n not in before else 'gone' if n not in after else 'changed'}: {n}" for n in sorted(lost)]
        return [", ".join(how[:4]) + (f" and {len(how) - 4} more" if len(how) > 4 else "")]


def words_of(command: str) -> list[str]:
    """A command of the tables as its words."""
    name, _, code = command.partition(" ")
    if name == "library":
        return [name, code]
    text = command.replace("\\udcff", "\udcff")
    found = []
    for word in shlex.split(text):
        found += ARGUMENTS.get(word, [word])
    return found


def there(folder: Path, pattern: str) -> bool:
    return next(folder.glob(pattern), None) is not None


def contents(folder: Path) -> dict[str, Any]:
    """Every file and folder, with what tells whether it changed."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
        else:
            found[name] = None
    return {name: value for name, value in found.items() if not name.endswith(".lock")}


if __name__ == "__main__":
    sys.exit(main())
