"""Impossible model settings give a one-line error before anything is built or read."""

from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import save_checkpoint
from small_runs import SMALL

from skipdecode import ConfigError
from train.build import build_model
from train.recipe import load_recipe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("settings") / "tiny", 6)


def refusal(*overrides: str) -> str:
    """The error message for a recipe; no example may be read before it."""
    with pytest.raises(ConfigError) as caught:
        build_model(load_recipe("quickstart", [*SMALL, *overrides]), iter(lambda: pytest.fail("data was read"), None))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_hidden_layers=abc", "num_hidden_layers"),
        ("num_hidden_layers=0", "num_hidden_layers is 0: it must be at least 1"),
        ("num_hidden_layers=4000000000", "it must be at most 1000"),
        ("num_hidden_layers=2.5", "num_hidden_layers"),
        ("hidden_size=0", "hidden_size is 0: it must be at least 1"),
        ("num_attention_heads=0", "num_attention_heads is 0"),
        ("num_attention_heads=5", "must be divisible by num_heads"),
        ("vocab_size=-4", "vocab_size is -4"),
        ("dropout=2", "dropout is 2: it must lie between 0 and 1"),
        ("layerdrop=-1", "layerdrop is -1"),
        ("activation_function=nix", "nix"),
        ("nonsense=4", "unknown key of the config of opt 'nonsense'"),
        ("num_hiden_layers=4", "did you mean 'num_hidden_layers'"),
        ("dtype=float32", "set model.dtype instead"),
        ("trust_remote_code=true", "unknown key"),
        ("model_type=optt", "optt"),
    ],
)
def test_invalid_config_values_of_a_shape_are_refused(override: str, message: str) -> None:
    assert message in refusal(f"model.config.{override}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_hidden_layers=abc", "num_hidden_layers can't be changed"),
        ("hidden_size=48", "hidden_size can't be changed"),
        ("dropout=2", "dropout is 2"),
        ("dropout=much", "dropout"),
        ("dtype=bfloat16", "set model.dtype instead"),
        ("nonsense=4", "unknown key"),
        ("trust_remote_code=true", "unknown key"),
        ("cache_dir=here", "unknown key"),
    ],
)
def test_invalid_config_changes_of_a_pretrained_model_are_refused(
    checkpoint: Path, override: str, message: str
) -> None:
    given = {"shape": "null", "name_or_path": str(checkpoint), "config": "null"}
    overrides = [f"model.{key}={value}" for key, value in given.items()]
    with pytest.raises(ConfigError) as caught:
        build_model(load_recipe("quickstart", [*overrides, f"model.config.{override}"]), [])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_valid_config_changes_of_a_pretrained_model_are_applied(checkpoint: Path) -> None:
    overrides = ["model.shape=null", f"model.name_or_path={checkpoint}", "model.config={dropout: 0.25}"]
    model, _ = build_model(load_recipe("quickstart", overrides), [])
    plain, _ = build_model(load_recipe("quickstart", [*overrides[:2], "model.config=null"]), [])
    assert (model.config.dropout, plain.config.dropout) == (0.25, 0.0)
    for name, weight in plain.state_dict().items():
        assert weight.equal(model.state_dict()[name]), name


def test_invalid_numbers_of_attention_heads_are_refused_in_every_family(tmp_path: Path) -> None:
    shape = tmp_path / "llama.yaml"
    sizes = "hidden_size: 64\nintermediate_size: 64\nnum_hidden_layers: 2\nnum_attention_heads: 4\n"
    shape.write_text(f"model_type: llama\nrope_theta: 500.0\nnum_key_value_heads: 3\n{sizes}")
    overrides = [f"model.shape={shape}", "model.config=null", "model.vocab_size=300"]
    with pytest.raises(ConfigError, match=r"it must be a multiple of num_key_value_heads \(3\)"):
        build_model(load_recipe("quickstart", overrides), [])


@pytest.mark.parametrize("source", ["shape", "name_or_path"])
def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint: Path, tmp_path: Path, source: str) -> None:
    larger = save_checkpoint(tmp_path / "larger", 2, vocab_size=400)
    own: Any = {
        "shape": [*SMALL, "model.vocab_size=512", "model.config.vocab_size=300"],
        "name_or_path": ["model.shape=null", f"model.name_or_path={checkpoint}", "model.config=null"],
    }
    with pytest.raises(ConfigError, match=rf"model.{source} .*: vocab_size is \d+: the tokenizer has \d+"):
        build_model(load_recipe("quickstart", [*own[source], f"model.tokenizer={larger}"]), [])
