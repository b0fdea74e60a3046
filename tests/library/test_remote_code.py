"""The code that a checkpoint carries decodes as the package does, where there is no package."""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_checkpoints import in_hub_cache, save_checkpoint
from transformers import GenerationConfig

import skipdecode
from skipdecode import SkipSchedule, skip_generate
from skipdecode.checkpoint import remote_code
from skipdecode.checkpoint.remote_code import FOLDER, custom_generate_files, write_custom_generate
from skipdecode.checkpoint.skip_config import save_default_speedup
from skipdecode.generate import remote_entry as hub

PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]
SPEEDUPS = [1, 2, 3]
SCHEDULE = {"num_layers": 6, "max_layers": 4, "min_layers": 2, "horizon": 5}

ANOTHER = "def check_speedup(*_): raise LookupError('another version')\n"
SCRIPT = (
    f"ANOTHER = {ANOTHER!r}"
    + """
import json, sys
from pathlib import Path

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("skipdecode", "data", "eval", "train"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, NoPackage())
from transformers import AutoModelForCausalLM, AutoTokenizer

repo, hub, other, prompts, speedups, schedule = json.loads(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(repo)
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
remote = {"custom_generate": repo, "trust_remote_code": True, "max_new_tokens": 12}
model = AutoModelForCausalLM.from_pretrained(repo)
tokens = [model.generate(**inputs, **remote, speedup=speedup) for speedup in speedups]
tokens.append(model.generate(**inputs, **remote, schedule=schedule))
trusted = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True)
mask = inputs["attention_mask"]
tokens.append(trusted.generate(inputs["input_ids"], attention_mask=mask, speedup=3, max_new_tokens=12))
tokens.append(trusted.generate(**inputs, max_new_tokens=12))
tokens.append(model.generate(**inputs, **remote, speedup=3, lossless=True))

def answer(repo):
    try:
        return model.generate(**inputs, **remote | {"custom_generate": repo}, speedup=3)
    except LookupError as error:
        assert str(error) == "another version", error

tokens.append(answer(hub))
assert answer(other) is None  # a checkpoint of the same name, with another version of the code
tokens.append(answer(repo))
file = Path(repo, "custom_generate", "schedule_solver.py")
code = file.read_text()
file.write_text(code + ANOTHER)
assert answer(repo) is None
file.write_text(code)
tokens.append(answer(repo))
print(json.dumps([ids.tolist() for ids in tokens]))
"""
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("bundle") / "tiny", 6)
    write_custom_generate(folder)
    return folder


def test_plain_transformers_gives_the_tokens_of_skip_generate(checkpoint: Path, tmp_path: Path) -> None:
    in_hub_cache(checkpoint, tmp_path / "hub", "me/tiny")
    other = shutil.copytree(checkpoint, tmp_path / "other" / checkpoint.name)
    with (other / FOLDER / "schedule_solver.py").open("a") as file:
        file.write(ANOTHER)
    request = json.dumps([str(checkpoint), "me/tiny", str(other), PROMPTS, SPEEDUPS, SCHEDULE])
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, request]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, tokenizer = skipdecode.load(str(checkpoint))
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)

    def decode(**how: object) -> list[list[int]]:
        return model.generate(**inputs, custom_generate=skip_generate, max_new_tokens=12, **how).tolist()

    expected = [decode(speedup=speedup) for speedup in SPEEDUPS]
    expected.append(decode(schedule=SkipSchedule.from_dict(SCHEDULE)))
    expected += [expected[2], *[model.generate(**inputs, max_new_tokens=12).tolist()] * 2]  # the last is lossless
    expected += [expected[2]] * 3
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert len({json.dumps(tokens) for tokens in expected[:4]}) == 4  # random weights: each speed says something else


def test_its_files_import_torch_transformers_python_and_each_other_alone(checkpoint: Path) -> None:
    files = {file.stem: ast.parse(file.read_text()) for file in (checkpoint / FOLDER).iterdir()}
    imported, tried = set(), set()
    for tree in files.values():
        within = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level or {node.module or name.name for name in node.names} <= files.keys()
                names = set() if node.level else {str(node.module).split(".")[0]}
            else:
                continue
            (tried if id(node) in within else imported).update(names)
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}  # which transformers asks for
    assert tried - imported - set(sys.stdlib_module_names) == {"triton"}


def test_it_holds_what_decodes_and_nothing_that_times_loads_or_prints() -> None:
    files = {name.removesuffix(".py") for name in custom_generate_files()}
    assert {"generate", "generate_skip_generate", "schedule_solver", "fastpath_model", "kernels_gpu"} <= files
    assert not {name for name in files if name.startswith(("cli", "timing", "training", "engine", "serve"))}
    assert files.isdisjoint({"checkpoint_loading", "checkpoint_remote_code", "checkpoint_export"})


def test_what_is_written_takes_the_place_of_what_was_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    old = {"generate.py": "# all in one", "gone.py": "# a module of an earlier version"}
    for name, text in old.items():
        (tmp_path / FOLDER / name).write_text(text)

    def found() -> dict[str, str]:
        assert [path.name for path in tmp_path.iterdir()] == [FOLDER.name]
        return {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}

    with monkeypatch.context() as patch:
        patch.setattr(remote_code, "custom_generate_files", lambda: {"a.py": "", "no/folder.py": ""})
        with pytest.raises(OSError, match="custom_generate"):
            write_custom_generate(tmp_path)
    assert found() == old
    assert write_custom_generate(tmp_path) == tmp_path / FOLDER
    assert found() == custom_generate_files()


def package(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a checkpoint would carry of a package of these files."""
    for name, text in files.items():
        (folder / "skipdecode" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "skipdecode" / name).write_text(text)
    monkeypatch.setattr(remote_code, "_SOURCES", folder)
    return custom_generate_files.__wrapped__()


def test_modules_of_subpackages_may_share_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from skipdecode.fast import NAME
def add(found):
    from skipdecode.fast.model import (
        add,  # of the same name
        MINE as THEIRS,
    )
    return add([*found, "slow", THEIRS])
"""
    files = {
        "generate/remote_entry.py": "from skipdecode.slow import model\nfrom skipdecode.fast import NAME\n"
        "def generate():\n    return model.add([NAME])\n",
        "slow/model.py": model,
        "fast/__init__.py": "from skipdecode.fast import names as n, model\nNAME = n.NAME\n",
        "fast/names.py": "NAME = 'name'\n",
        "fast/model.py": "MINE = 'mine'\ndef add(found):\n    return [*found, 'fast']\n",
        "unused.py": "",
    }
    carried = package(tmp_path, files, monkeypatch)
    modules = ("generate", "generate_remote_entry", "slow_model", "fast", "fast_names", "fast_model")
    assert {*carried} == {f"{name}.py" for name in modules}
    (tmp_path / "carried").mkdir()
    for name, text in carried.items():
        (tmp_path / "carried" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("carried.generate").generate() == ["name", "slow", "mine", "fast"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("from skipdecode.a.b import x\nfrom skipdecode.a_b import x\n", "would be a second a_b.py"),
        ("from skipdecode.generate import x\n", "would be a second generate.py"),
        ("from skipdecode import x\n", "an import from skipdecode can't be carried"),
        ("def f():\n    import skipdecode.a.b\n", "import skipdecode.a.b can't be carried"),
    ],
)
def test_what_no_file_can_stand_for_is_refused(
    entry: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"generate/__init__.py": "", "generate/remote_entry.py": entry, "a/b.py": "", "a_b.py": ""}
    with pytest.raises(ValueError, match=message):
        package(tmp_path, files, monkeypatch)


def test_who_asks_for_no_speed_gets_the_checkpoints_own(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "tiny", 6)
    save_default_speedup(folder, 3.0)
    model, tokenizer = skipdecode.load(str(folder))
    inputs = {**tokenizer(PROMPTS, return_tensors="pt", padding=True), "max_new_tokens": 12}

    def expected(**how: object) -> list[list[int]]:
        return model.generate(**inputs, custom_generate=skip_generate, **how).tolist()

    def decoded(**how: object) -> list[list[int]]:
        return hub.generate(model=model, **inputs, **how).tolist()

    texts = [expected(speedup=speedup) for speedup in (1, 2, 3)]
    assert texts[0] == model.generate(**inputs).tolist()
    assert len({json.dumps(tokens) for tokens in texts}) == 3
    assert decoded() == texts[2]
    assert decoded(speedup=1) == texts[0]
    assert decoded(speedup=2) == texts[1]
    # As servers pass it that know nothing of speeds.
    assert decoded(generation_config=GenerationConfig(speedup=2)) == texts[1]
    assert decoded(generation_config=GenerationConfig(speedup=1)) == texts[0]
    assert decoded(generation_config=GenerationConfig(do_sample=False)) == texts[2]
    assert decoded(generation_config=GenerationConfig(speedup=2, lossless=True)) == texts[0]
    assert decoded(generation_config=GenerationConfig(schedule=SCHEDULE)) == expected(schedule=SCHEDULE)
    with pytest.raises(skipdecode.ConfigError, match=r"num_beams is 2: .* checkpoint's own speed, 3x; speedup=1 is"):
        decoded(num_beams=2)
    del inputs["max_new_tokens"]
    asked_for_more = decoded(generation_config=GenerationConfig(max_new_tokens=1024, eos_token_id=-1))
    assert len(asked_for_more[0]) == 128 + 1  # as many positions as there are, and a last token without one
    inputs["max_new_tokens"] = 12
    model.generation_config.default_speedup = "3"  # as somebody may write it
    with pytest.raises(skipdecode.ConfigError, match=r"speedup is '3': it must be .* own speed, 3x; speedup=1 is full"):
        decoded()
    save_default_speedup(folder, None)
    model, _ = skipdecode.load(str(folder))
    assert decoded() == texts[0]
