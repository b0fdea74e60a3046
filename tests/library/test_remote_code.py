"""The file that a checkpoint carries decodes as the package does, where there is no package."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoints import save_checkpoint
from transformers import GenerationConfig

import skipdecode
from skipdecode import SkipSchedule, skip_generate
from skipdecode.checkpoint.remote_code import PATH, custom_generate_source, write_custom_generate
from skipdecode.checkpoint.skip_config import save_default_speedup
from skipdecode.generate import remote_entry as hub

PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]
SPEEDUPS = [1, 2, 3]
SCHEDULE = {"num_layers": 6, "max_layers": 4, "min_layers": 2, "horizon": 5}

SCRIPT = """
import json, sys

class NoPackage:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("skipdecode", "data", "eval", "train"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, NoPackage())
from transformers import AutoModelForCausalLM, AutoTokenizer

repo, prompts, speedups, schedule = json.loads(sys.argv[1])
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
print(json.dumps([ids.tolist() for ids in tokens]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("bundle") / "tiny", 6)
    write_custom_generate(folder)
    return folder


def test_plain_transformers_gives_the_tokens_of_skip_generate(checkpoint: Path, tmp_path: Path) -> None:
    request = json.dumps([str(checkpoint), PROMPTS, SPEEDUPS, SCHEDULE])
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, request], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    model, tokenizer = skipdecode.load(str(checkpoint))
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)

    def decode(**how: object) -> list[list[int]]:
        return model.generate(**inputs, custom_generate=skip_generate, max_new_tokens=12, **how).tolist()

    expected = [decode(speedup=speedup) for speedup in SPEEDUPS]
    expected.append(decode(schedule=SkipSchedule.from_dict(SCHEDULE)))
    expected += [expected[-2], *[model.generate(**inputs, max_new_tokens=12).tolist()] * 2]  # the last is lossless
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert len({json.dumps(tokens) for tokens in expected[:4]}) == 4  # random weights: each speed says something else


def test_the_file_holds_no_import_but_torch_transformers_and_pythons_own(checkpoint: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse((checkpoint / PATH).read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_the_file_holds_what_decodes_and_nothing_that_times_loads_or_prints() -> None:
    modules = set(re.findall(r"^# ---- skipdecode\.([\w.]+) -", custom_generate_source(), flags=re.MULTILINE))
    assert {"generate.skip_generate", "schedule.solver", "fastpath.model", "generate.remote_entry"} <= modules
    assert not {name for name in modules if name.startswith(("cli", "timing", "training", "engine", "serve"))}
    assert modules.isdisjoint({"checkpoint.loading", "checkpoint.remote_code", "checkpoint.export"})


def test_what_is_written_is_the_same_every_time(checkpoint: Path) -> None:
    assert (checkpoint / PATH).read_text() == custom_generate_source()
    assert [path.name for path in (checkpoint / PATH).parent.iterdir()] == [PATH.name]


def test_two_definitions_of_a_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import skipdecode.checkpoint.remote_code

    monkeypatch.setattr(
        skipdecode.checkpoint.remote_code, "_modules", lambda _: {"one": "def f(): ...\n", "two": "f: int = 3\n"}
    )
    with pytest.raises(ValueError, match="f is defined in one and in two"):
        custom_generate_source.__wrapped__()


def test_a_target_that_cannot_be_met_is_refused(checkpoint: Path) -> None:
    model, tokenizer = skipdecode.load(str(checkpoint))
    inputs = tokenizer(PROMPTS[:1], return_tensors="pt")

    def decode(**how: object) -> torch.Tensor:
        return model.generate(**inputs, custom_generate=skip_generate, max_new_tokens=4, **how)

    for how, message in (
        ({}, "schedule is missing"),
        ({"speedup": 2, "schedule": SkipSchedule(6, 3, 1)}, "both schedule and speedup are given"),
        ({"speedup": 0.5}, "speedup is 0.5: it must be a number of at least 1"),
        ({"speedup": "2"}, "speedup is '2': it must be a number of at least 1"),
        ({"speedup": 90}, "reaches at most"),
        ({"speedup": 2, "over": ["all"]}, r"over .*\['all'\]"),
        ({"schedule": {**SCHEDULE, "horizn": 3}}, "horizn"),
    ):
        with pytest.raises(skipdecode.ConfigError, match=message):
            decode(**how)
    del model.config.skipdecode
    with pytest.raises(skipdecode.ConfigError, match="doesn't say what schedules it was trained for"):
        decode(speedup=2.5)


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
    with pytest.raises(
        skipdecode.ConfigError, match=r"num_beams is 2: .* checkpoint's own speed, 3x; speedup=1 is full"
    ):
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
