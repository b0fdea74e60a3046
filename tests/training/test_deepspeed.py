"""Several processes, sharded by DeepSpeed or not, train the same weights as one process, and resume."""

import functools
import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import run_python, start_python
from small_runs import SMALL, metrics
from transformers import AutoModelForCausalLM

import train.cli
from skipdecode import ConfigError
from train.distributed import check_world_size, read_deepspeed
from train.recipe import DEEPSPEED, load_recipe
from train.run import run

LEARNING_RATE = 3e-3
ROWS = 12  # rows of a step, over all processes; there are 120, so that another order would give other steps
COMMON = [*SMALL, "model.config.dropout=0.0", "data.options={train_size: 40, validation_size: 4, test_size: 4}"]
COMMON += [f"optim.learning_rate={LEARNING_RATE}", "train.max_steps=4", "train.save_steps=2"]
# What is trained. One process without DeepSpeed is the reference.
WHAT = {
    "sampled": [],
    "skipping prompts": ["schedule.prompt=max"],
    "prompts of some layers": ["schedule.prompt=5"],
    "sandwich": ["schedule.sampling=sandwich", "optim.distillation=0.5"],
    "sandwich, prompts of some layers": ["schedule.prompt=5", "schedule.sampling=sandwich", "optim.distillation=0.5"],
}
# How it is trained: a DeepSpeed config, and settings that must not change the result.
PARTS = ["train.per_device_batch_size=3", "train.gradient_accumulation_steps=2"]
CASES = [
    ("zero1", "prompts of some layers", []),
    ("zero2", "prompts of some layers", PARTS),
    ("zero3", "sandwich, prompts of some layers", []),
    ("zero2-offload", "sandwich", []),
    ("zero3-offload", "sandwich, prompts of some layers", ["train.gradient_checkpointing=true"]),
    (None, "skipping prompts", ["train.gradient_checkpointing=true"]),
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def training(folder: Path, *overrides: str) -> list[str]:
    return ["--recipe", "quickstart", *COMMON, f"output.dir={folder}", *overrides]


def train_on_two(folder: Path, *overrides: str, log: Path) -> str:
    """Train on two processes, each with half of the rows; the schedules that each sampled are in `log`'s folder."""
    arguments = training(folder, f"train.per_device_batch_size={ROWS // 2}", *overrides)
    status = run_python(["tests/support/draws_logged.py", str(log.parent), *arguments], log, processes=2)
    assert status == 0, log.read_text()[-3000:]
    return log.read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains on one process without DeepSpeed; returns the folder of the run."""

    @functools.cache
    def train_alone(what: str) -> Path:
        folder = tmp_path_factory.mktemp("alone") / "run"
        arguments = training(folder, f"train.per_device_batch_size={ROWS}", *WHAT[what])
        return run(load_recipe("quickstart", arguments[2:]), "quickstart")

    return train_alone


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None, str], Path]:
    """Trains on two processes; the schedules that each of them sampled are in the run's parent folder."""

    @functools.cache
    def train_sharded(config: str | None, what: str) -> Path:
        (case,) = (overrides for c, w, overrides in CASES if (c, w) == (config, what))
        parent = tmp_path_factory.mktemp("sharded")
        deepspeed = [] if config is None else [f"deepspeed.config={config}"]
        train_on_two(parent / "run", *deepspeed, *WHAT[what], *case, log=parent / "log.txt")
        return parent / "run"

    return train_sharded


def check_same_training(mine: Path, reference: Path) -> None:
    """Check equal losses, gradient norms and weights, up to the order of float32 additions."""
    for line, expected in zip(metrics(mine), metrics(reference), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for exact in ("step", "speedup_target", "learning_rate"):
            assert line[exact] == expected[exact]
    check_same_weights(mine, reference)


def check_same_weights(mine: Path, reference: Path) -> None:
    expected = weights(reference)
    found = weights(mine)
    assert found.keys() == expected.keys()
    apart = torch.cat([(value - expected[name]).abs().flatten() for name, value in found.items()])
    # Adam moves a weight by about the learning rate whatever the size of its gradient, so where the gradient is only
    # rounding, a weight may move in either direction in each of the four steps.
    assert float(apart.max()) < 2 * 4 * LEARNING_RATE
    assert float(apart.mean()) < 1e-5
    assert float((apart > 1e-5).float().mean()) < 1e-2


# The other configs are tested before a release; they differ from these in ways that are tested elsewhere.
SHORT = ("zero2", "zero3")


@pytest.mark.parametrize(
    ("config", "what"), [pytest.param(c, what, marks=() if c in SHORT else pytest.mark.release) for c, what, _ in CASES]
)
def test_two_processes_train_the_same_weights_as_one(
    config: str | None, what: str, alone: Callable[[str], Path], sharded: Callable[[str | None, str], Path]
) -> None:
    folder = sharded(config, what)
    check_same_training(folder, alone(what))
    drawn = [(folder.parent / f"{rank}.jsonl").read_text() for rank in (0, 1)]
    assert drawn[0] == drawn[1], "all ranks must use the same schedules"
    steps = {json.loads(line)[0] for line in drawn[0].splitlines()}
    assert steps == {0, 1, 2, 3}
    assert {file.name for file in folder.glob("*.safetensors")} == {"model.safetensors"}
    size, reference = (f.joinpath("model.safetensors").stat().st_size for f in (folder, alone(what)))
    assert size == pytest.approx(reference, rel=0.01), "a tied head is saved once"


def test_an_interrupted_sharded_run_ends_with_the_weights_of_an_uninterrupted_one(
    sharded: Callable[[str | None, str], Path], tmp_path: Path
) -> None:
    zero3 = "deepspeed.config=zero3"  # its checkpoints are sharded
    folder = sharded("zero3", "sandwich, prompts of some layers")
    whole = shutil.copytree(folder, tmp_path / "whole", ignore=shutil.ignore_patterns("checkpoint-*"))
    # The state of a run that was killed after step 4 and before its checkpoint.
    shutil.rmtree(folder / "checkpoint-4")
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()

    # One process alone can't continue, because the other's shard would be lost.
    left = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    trained = [zero3, *WHAT["sandwich, prompts of some layers"]]
    recipe = training(folder, f"train.per_device_batch_size={ROWS // 2}", *trained)
    assert run_python(["train.py", *recipe], tmp_path / "refused.txt") == 2
    error = (tmp_path / "refused.txt").read_text().splitlines()[-1]
    assert error.startswith("error: ")
    assert "checkpoint-2 was written by 2 processes, but now there is 1: continue with 2" in error
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == left

    printed = train_on_two(folder, *trained, log=tmp_path / "log.txt")
    assert "checkpoint-2" in printed
    steps = {json.loads(line)[0] for line in (tmp_path / "1.jsonl").read_text().splitlines()}
    assert steps == {2, 3}
    expected = weights(whole)
    for name, value in weights(folder).items():
        assert torch.equal(value, expected[name]), name
    assert [line["loss"] for line in metrics(folder)] == [line["loss"] for line in metrics(whole)]


@pytest.mark.release  # processes of two launchers train as those of one do
def test_two_launchers_train_the_same_weights_as_one_process(alone: Callable[[str], Path], tmp_path: Path) -> None:
    """Two launchers, as on two machines, with a rendezvous address and a shared output folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_id", "test", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    launcher = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d", *meeting, "--local_addr", "127.0.0.1"]
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    arguments = training(folder, f"train.per_device_batch_size={ROWS // 2}", "deepspeed.config=zero2")
    command = [*launcher, "tests/support/draws_logged.py", str(tmp_path), *arguments]
    agents = [start_python(command, log) for _ in range(2)]
    for agent in agents:
        agent.join(timeout=300)
    assert [agent.exitcode for agent in agents] == [0, 0], log.read_text()[-3000:]
    check_same_training(folder, alone("sampled"))
    assert (tmp_path / "0.jsonl").read_text() == (tmp_path / "1.jsonl").read_text()


def test_a_pretrained_model_is_read_into_shards_and_trains_as_on_one_process(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    pretrained = alone("sampled")
    changes = ["model.shape=null", "model.config=null", f"model.name_or_path={pretrained}", "train.max_steps=2"]
    changes += ["model.vocab_size=512"]  # the default, because no tokenizer is trained
    arguments = training(tmp_path / "alone", f"train.per_device_batch_size={ROWS}", *changes)
    reference = run(load_recipe("quickstart", arguments[2:]), "quickstart")
    folder = tmp_path / "sharded"
    printed = train_on_two(folder, *changes, "deepspeed.config=zero3", log=tmp_path / "log.txt")
    check_same_training(folder, reference)
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(pretrained).parameters())
    assert f"{count / 1e6:.2f} M parameters" in printed  # all of them, though no process holds all


def test_every_deepspeed_config_is_tested_and_leaves_the_recipes_settings_on_auto() -> None:
    assert {path.stem for path in DEEPSPEED.glob("*.json")} == {config for config, *_ in CASES if config}
    for path in DEEPSPEED.glob("*.json"):
        values = json.loads(path.read_text())
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
            assert values[key] == "auto"
        assert values["bf16"] == values["fp16"] == {"enabled": "auto"}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("{", [], "expected a JSON object with zero_optimization.stage"),
        ("[]", [], "expected a JSON object with zero_optimization.stage"),
        ('{"bf16": {"enabled": true}}', [], "expected a JSON object with zero_optimization.stage (KeyError"),
        ('{"zero_optimization": {"stage": 4}}', [], "zero_optimization.stage is 4, expected 0, 1, 2 or 3"),
        ('{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}', [], "has a scheduler: remove it"),
        ('{"zero_optimization": {"stage": 2}, "bf16": true}', [], "bf16 is True, expected an object"),
        ('{"zero_optimization": {"stage": 2}, "optimizer": "AdamW"}', [], "optimizer is 'AdamW', expected an object"),
        ('{"zero_optimization": {"stage": 2}, "optimizer": {"params": [1]}}', [], "optimizer.params is [1], expected"),
        ('{"zero_optimization": {"stage": 3, "offload_param": "cpu"}}', [], "offload_param is 'cpu', expected an obj"),
        ('{"zero_optimization": {"stage": 2}}', ["train.precision=fp16"], "needs a GPU: expected float32 or bf16"),
        ('{"zero_optimization": {"stage": 2}}', [], "is not installed: pip install 'skipdecode[deepspeed]'"),
    ],
)
def test_an_invalid_deepspeed_config_gives_a_one_line_error_and_writes_nothing(
    text: str, overrides: list[str], message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it raises, as where it isn't installed
    config = tmp_path / "own.json"
    config.write_text(text)
    folder = tmp_path / "run"
    assert train.cli.main(training(folder, f"deepspeed.config={config}", *overrides)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not folder.exists()


def test_missing_deepspeed_settings_come_from_the_recipe_and_one_process_needs_no_launcher(
    alone: Callable[[str], Path], tmp_path: Path
) -> None:
    config, folder, log = tmp_path / "own.json", tmp_path / "run", tmp_path / "log.txt"
    own = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "optimizer": own}))
    read = read_deepspeed(str(config))
    assert (read["gradient_accumulation_steps"], read["gradient_clipping"]) == ("auto", 0.5)
    left = dict.fromkeys(("weight_decay", "betas", "eps"), "auto")
    assert read["optimizer"] == {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3, **left}}
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    arguments = training(folder, f"train.per_device_batch_size={ROWS}", f"deepspeed.config={config}")
    assert run_python(["train.py", *arguments], log) == 0, log.read_text()[-3000:]
    check_same_training(folder, alone("sampled"))


def test_a_deepspeed_config_that_contradicts_the_recipe_is_refused(tmp_path: Path) -> None:
    config, folder = tmp_path / "own.json", tmp_path / "run"
    values = {**json.loads((DEEPSPEED / "zero2.json").read_text()), "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    config.write_text(json.dumps(values))
    log = tmp_path / "log.txt"
    assert run_python(["train.py", *training(folder, f"deepspeed.config={config}")], log) == 2
    error = log.read_text().splitlines()[-1]
    assert error.startswith("error: ")
    assert "gradient_clipping=0.5 against max_grad_norm=1.0" in error
    assert "bf16.enabled=True" in error
    assert not folder.exists()


def test_only_sharded_checkpoints_need_the_same_number_of_processes(tmp_path: Path) -> None:
    check_world_size(tmp_path, 3)
    (tmp_path / "global_step2").mkdir()
    for rank in range(2):
        (tmp_path / "global_step2" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    check_world_size(tmp_path, 2)
    with pytest.raises(ConfigError, match="was written by 2 processes, but now there are 3: continue with 2"):
        check_world_size(tmp_path, 3)
