"""Python code that a checkpoint brings runs where the user asked for it by a flag, and nowhere else."""

import io
import json
from pathlib import Path

import pytest
from opening_commands import opening_commands
from small_checkpoints import save_checkpoint
from small_runs import train_small

import skipdecode
from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_tokenizer
from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.checkpoint.skip_config import SkipConfig

CODE = """
from pathlib import Path
from transformers import GPT2Tokenizer, OPTConfig, OPTForCausalLM
Path({marker!r}).touch()
class MineConfig(OPTConfig):
    model_type = "mine"
class Mine(OPTForCausalLM):
    config_class = MineConfig
class MineTokenizer(GPT2Tokenizer):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def checkpoint(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    folder = save_checkpoint(tmp_path / "checkpoint", 2)
    (folder / "mine.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    write_custom_generate(folder)
    return folder


def test_no_command_runs_it_unasked_whatever_standard_input_says(
    checkpoint: Path, marker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(checkpoint)
    for command in opening_commands(name, tmp_path):
        assert command() == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {name!r} contains Python code that must run to load it")
        assert "pass --trust-remote-code" in error
        assert error.count("\n") == 1
    start = ["model.shape=null", f"model.name_or_path={name}"]
    for config in ("model.config=null", "model.config={dropout: 0.1}"):
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
            train_small(tmp_path / "run", *start, config)
    assert SkipConfig.load(name) is not None  # reads the file alone
    assert not marker.exists()
    assert not (tmp_path / "run").exists()


def test_the_values_of_a_config_are_no_arguments_of_loading(checkpoint: Path, marker: Path, tmp_path: Path) -> None:
    plain = save_checkpoint(tmp_path / "plain", 2)
    for folder in (plain, checkpoint):
        for key in ("trust_remote_code", "revision", "state_dict", "device_map"):
            start = ["model.shape=null", f"model.name_or_path={folder}", f"model.config={{{key}: true}}"]
            with pytest.raises(ConfigError, match=rf"unknown key .* of opt '{key}'|model.trust_remote_code=true"):
                train_small(tmp_path / "run", *start)
    assert not marker.exists()


def test_a_tokenizer_with_code_is_refused_as_a_model_is(checkpoint: Path, marker: Path) -> None:
    file = checkpoint / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "MineTokenizer"}
    file.write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": ["mine.MineTokenizer", None]}}))
    with pytest.raises(ConfigError, match="contains Python code that must run"):
        load_tokenizer(str(checkpoint))
    assert not marker.exists()


def test_it_runs_where_the_flag_says_so(checkpoint: Path, marker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert skipdecode.cli.options.main(["generate", str(checkpoint), "hello", "--trust-remote-code"]) == 2
    assert marker.exists()
    assert "model_type 'mine' is not known: add it with" in capsys.readouterr().err
    model, _ = skipdecode.load(str(checkpoint), trust_remote_code=True)
    assert type(model).__name__ == "Mine"
    assert model.generate.__func__ is type(model).generate  # its custom_generate is not in the place of ours
