"""Models in GGUF files are loaded as plain models, equal to transformers', or refused with a clear message."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import in_hub_cache, save_checkpoint
from tiny_gguf import NAME, TITLE, tiny_llama, write_empty_gguf, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import skipdecode
from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_model
from skipdecode.cli.options import main

PROMPT = "vehicle: ferry | to: Saltfern\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny", *tiny_llama())


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def test_a_gguf_file_gives_the_model_and_the_tokenizer_that_were_written(folder: Path) -> None:
    written, written_tokenizer = tiny_llama()
    model, tokenizer = skipdecode.load(str(folder), gguf_file=NAME)
    ids = written_tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert tokenizer(PROMPT)["input_ids"] == ids[0].tolist()
    assert tokenizer.padding_side == "left"
    for token in ("bos_token_id", "eos_token_id"):
        assert getattr(tokenizer, token) == getattr(written_tokenizer, token)
        assert getattr(model.generation_config, token) == getattr(written_tokenizer, token)
    # transformers would add <|endoftext|>, which has no embedding.
    assert tokenizer.get_vocab() == written_tokenizer.get_vocab()
    torch.testing.assert_close(logits(model, ids), logits(written, ids))


@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0", "F16"])
def test_a_gguf_model_has_the_logits_that_transformers_gives(quantization: str, tmp_path: Path) -> None:
    folder = write_tiny_gguf(tmp_path, *tiny_llama(2), quantization)
    ids = torch.arange(4, 40)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=torch.float32)
    assert torch.equal(logits(load_model(str(folder), gguf_file=NAME), ids), logits(theirs, ids))
    assert load_model(str(folder), torch.bfloat16, gguf_file=NAME).dtype == torch.bfloat16


def test_a_gguf_model_is_saved_as_a_plain_checkpoint_without_a_trace_of_gguf(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = skipdecode.load(str(folder), gguf_file=NAME)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        assert b"gguf" not in content.lower(), file
        assert TITLE.encode() not in content, file
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)(PROMPT, return_tensors="pt")["input_ids"]
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_a_gguf_file_of_the_same_name_in_the_working_directory_is_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers looks for the weights there first."""
    (tmp_path / NAME).write_bytes(b"GGUF, and nothing else")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "below")
    model, _ = skipdecode.load("below", gguf_file=NAME)
    assert model.config.num_hidden_layers == 8


def test_a_gguf_file_of_the_hub_is_read_from_the_cache_without_a_config(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_hub_cache(folder, tmp_path, "me/tiny")
    monkeypatch.setattr("skipdecode.checkpoint.offline._answers", lambda address: False)
    model, tokenizer = skipdecode.load("me/tiny", gguf_file=NAME, cache_dir=str(tmp_path))
    assert model.name_or_path == model.config.name_or_path == "me/tiny"
    assert tokenizer(PROMPT)["input_ids"]
    with pytest.raises(ConfigError, match="no copy of it in the cache, and the Hub can't be reached"):
        load_model("me/tiny", gguf_file="other.gguf", cache_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", "'absent.gguf': there is no such file in 'FOLDER', which has clip.gguf, cut.gguf, tiny.gguf"),
        ("", "gguf_file is ''"),
        ("notes.txt", "'notes.txt' of 'FOLDER' isn't GGUF: it starts with b'some', not b'GGUF'"),
        ("clip.gguf", "FOLDER/clip.gguf' can't be loaded as a causal language model: GGUF model with architecture"),
        ("cut.gguf", "FOLDER/cut.gguf' can't be loaded as a causal language model: "),
    ],
)
def test_an_unreadable_gguf_file_is_refused_in_one_line(folder: Path, tmp_path: Path, name: str, message: str) -> None:
    place = tmp_path / "tiny"
    shutil.copytree(folder, place)
    write_empty_gguf(place / "clip.gguf", "clip")
    (place / "cut.gguf").write_bytes((folder / NAME).read_bytes()[:20_000])
    (place / "notes.txt").write_text("some words")
    with pytest.raises(ConfigError) as caught:
        skipdecode.load(str(place), gguf_file=name)
    assert message.replace("FOLDER", str(place)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_in_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="'/nowhere/at/all' is not a folder: give the folder of the file"):
        load_model("/nowhere/at/all", gguf_file=NAME)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    folder: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}, .* pip install 'skipdecode\[gguf\]'"):
        load_model(str(folder), gguf_file=NAME)


def test_a_gguf_file_given_as_a_checkpoint_is_refused_with_advice(folder: Path) -> None:
    for name in (folder, folder / NAME):
        with pytest.raises(ConfigError, match=r"GGUF file.* --gguf-file \(in a recipe model.gguf_file"):
            load_model(str(name))


def test_skipdecode_generate_decodes_with_a_gguf_model(folder: Path, capsys: Any) -> None:
    options = ["--gguf-file", NAME, "--max-new-tokens", "9"]
    assert main(["generate", str(folder), *options, "--json", PROMPT.replace("\n", "\\n")]) == 0
    found = json.loads(capsys.readouterr().out)
    model, tokenizer = skipdecode.load(str(folder), gguf_file=NAME)
    inputs = tokenizer([PROMPT], return_tensors="pt")
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=9)
    assert found["text"] == tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert main(["info", str(folder), "--gguf-file", "absent.gguf"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: gguf_file 'absent.gguf': there is no such file")


def test_no_other_file_in_the_folder_of_a_gguf_file_is_read(folder: Path, tmp_path: Path) -> None:
    """The folder also has another model's weights, tokenizer, checksums and adapters; transformers would read some."""
    place = save_checkpoint(tmp_path / "run", 4, vocab_size=300)
    shutil.copy(folder / NAME, place)
    (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/nowhere"}))
    _, alone = skipdecode.load(str(folder), gguf_file=NAME)
    model, tokenizer = skipdecode.load(str(place), gguf_file=NAME)
    assert model.config.model_type == "llama"
    assert tokenizer.get_vocab() == alone.get_vocab()
    assert tokenizer.special_tokens_map == alone.special_tokens_map
