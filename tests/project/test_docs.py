"""What the documentation tells its readers to type works: every block of every page is run, on a smaller model."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

import eval.cli
import eval.report.cli
import eval.search.cli
import eval.speed.cli
import skipdecode.cli.options
import train.cli
from train.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# The quickstart first: what it trains, the other pages use.
PAGES = ["quickstart.md", "../README.md", "install.md", "pretrained-model.md", "reference/data-files.md"]
PAGES += sorted(f"guides/{path.name}" for path in (DOCS / "guides").glob("*.md"))
USER_PAGES = [*DOCS.glob("*.md"), *(DOCS / "guides").glob("*.md")]
_BLOCK = re.compile(r"(?:^<!-- (not run|as): (.+?) -->\n)?^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# In place of what makes the environment that tests already have or serves until it is stopped, of a model that is
# downloaded, and of the minutes that a real model takes.
NOT_RUN = ("make install", "make quickstart", "make test", "source .venv/bin/activate", "skipdecode serve")
OWN = [
    "model.name_or_path=outputs/quickstart",
    "train.max_steps=3",
    "train.per_device_batch_size=4",
    "optim.warmup_steps=0",
]
OWN += ["train.precision=float32", "evaluation.speedups=null", "data.max_prompt_tokens=32", "tracking.wandb=off"]
SMALLER = {
    "train": [*(change for change in SMALL if not change.startswith("data.")), "train.max_steps=3"],
    "rows": ["data.options={train_size: 60, validation_size: 4, test_size: 12}"],
    "eval": ["--limit", "3", "--max-new-tokens", "6"],
    "search": ["--trials", "2", "--max-new-tokens", "4"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page, language, text: where it stands and what it is.
        skipped: why it isn't run; None where it is.
    """

    page: str
    language: str
    text: str
    skipped: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a bash block, each as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line, comments=True) for line in lines if line.strip()]


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(page, m[3], m[4], m[2] if m[1] == "not run" else None) for m in _BLOCK.finditer(text)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone as a reader has one, in which commands run."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("train.py", "train", "eval", "data", "scripts", "recipes", "configs", "skipdecode", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my-data").mkdir()
    rows = [json.dumps({"prompt": f"Number {n}?", "completion": f"It is {n}."}) for n in range(220)]
    (folder / "my-data" / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def run(words: list[str]) -> None:
    """A command of a page, in this process, since importing torch again takes longer than it does."""
    if words[0] == "python":
        words = words[1:]
    script, rest = words[0], words[1:]
    if script == "train.py":
        if "text" in rest:
            smaller = OWN
        else:
            smaller = (
                SMALLER["train"]
                if any(word.startswith("data.") for word in rest)
                else [*SMALLER["train"], *SMALLER["rows"]]
            )
        status = train.cli.main([*rest, *smaller])
    elif script == "-m":
        module, rest = rest[0], rest[1:]
        mains: dict[str, Any] = {"eval": eval.cli, "eval.report": eval.report.cli, "eval.speed": eval.speed.cli}
        mains["eval.search"] = eval.search.cli
        smaller = {"eval": SMALLER["eval"], "eval.search": SMALLER["search"]}.get(module, [])
        status = mains[module].main([*rest, *smaller])
    elif script == "skipdecode":
        status = skipdecode.cli.options.main(rest)
    elif script.startswith("scripts/"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [script, *rest])
            status = runpy.run_path(script)["main"]()
    elif script in ("mkdir", "printf"):
        status = subprocess.run(shlex.join(words).replace("'>'", ">"), shell=True).returncode
    else:
        raise AssertionError(f"no test knows the command {script!r}")
    assert status == 0, words


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_works(page: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page):
        if block.skipped is not None:
            continue
        if block.language == "python":
            exec(compile(block.text, f"{page}", "exec"), {"__name__": "page"})
            assert capsys.readouterr().out.strip() or "print" not in block.text
            continue
        for words in block.commands:
            if not shlex.join(words).startswith(NOT_RUN):
                run(words)


def test_commands_that_are_not_run_at_least_resolve() -> None:
    """Those that want GPUs, an account, real data or hours, in every page and the README."""
    recipes = scripts = 0
    for path in [ROOT / "README.md", ROOT / "recipes" / "README.md", *DOCS.rglob("*.md")]:
        for fence in _FENCE.findall(path.read_text(encoding="utf-8")):
            for line in fence.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if line.startswith(("python ", "torchrun ")) else []
                if "train.py" in words:
                    left_out = ("...", "--dry-run", "--help")
                    rest = words[words.index("train.py") + 1 :]
                    given = [word for word in rest if word not in left_out and "$" not in word]
                    if "--recipe" in given and given[1].islower():
                        load_recipe(given[1], given[2:])
                        recipes += 1
                for word in words:
                    # The journal names scripts that only the repository's history has.
                    if word.startswith("scripts/") and "research" not in path.parts:
                        assert (ROOT / word).exists(), (path, word)
                        scripts += 1
    assert recipes >= 10
    assert scripts > 4


def test_the_notebook_is_that_of_the_quickstart() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "make_notebook.py"))["notebook"]
    text = (DOCS / "quickstart.ipynb").read_text(encoding="utf-8")
    assert text == written((DOCS / "quickstart.md").read_text(encoding="utf-8")), "run python scripts/make_notebook.py"
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    expected = [block for block in blocks("quickstart.md") if "make install" not in block.text]
    assert [cell.removeprefix("%%bash\n") for cell in cells[1:]] == [block.text.strip() for block in expected]


def test_the_tables_of_results_are_those_of_the_data_files() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_results.py"))
    for page in script["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert "<!-- table: " in text
        assert text == script["with_tables"](text), f"{page.name}: run python scripts/draw_results.py"


def test_the_readme_and_the_pages_for_users_stay_short() -> None:
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in USER_PAGES}
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 450
    assert sum(words.values()) <= 9000, words


def test_every_command_has_its_help_on_the_page_of_commands(capsys: Any) -> None:
    shown = re.findall(r"<!-- help: -m (.+) -->", (DOCS / "reference" / "commands.md").read_text(encoding="utf-8"))
    modules = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in ROOT.glob("eval/**/__main__.py")}
    with pytest.raises(SystemExit):
        skipdecode.cli.options.main(["--help"])
    named = re.findall(r"^  ([a-z]+) +[a-z]", capsys.readouterr().out, re.MULTILINE)
    assert "calibrate" in named
    assert set(shown) == {"skipdecode", *modules, *(f"skipdecode {name}" for name in named)}


@pytest.mark.release  # make docs is a step of .ci/run
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert {"index.html", "quickstart/index.html", "reference/library/index.html", "results/index.html"} <= pages
    moved = (tmp_path / "site" / "how-to" / "measure" / "index.html").read_text(encoding="utf-8")
    assert "../../guides/evaluate/" in moved  # old addresses lead to the new ones
    contributing = (tmp_path / "site" / "developer" / "contributing" / "index.html").read_text(encoding="utf-8")
    assert "Set up" in contributing
    commands = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "usage: skipdecode generate" in commands
    assert "usage: python -m eval" in commands


def test_the_walks_name_files_that_are_there_none_of_them_twice() -> None:
    text = (DOCS / "developer" / "walks.md").read_text(encoding="utf-8")
    walks = [re.findall(r"^\| `([^`]+)` \|", walk, re.MULTILINE) for walk in text.split("| file |")[1:]]
    assert [len(walk) > 9 for walk in walks] == [True, True, True]
    for walk in walks:
        assert len(set(walk)) == len(walk)
        assert [name for name in walk if not (ROOT / name).is_file()] == []
