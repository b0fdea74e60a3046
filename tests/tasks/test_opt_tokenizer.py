"""OPT's tokenizer, built from its vocabulary and merges alone."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from skipdecode import ConfigError
from skipdecode.checkpoint.loading import load_tokenizer

TEXTS = ("Hello world", " two  spaces, isn 't it . \n\nTL;DR:", "naïve — 日本 €20\n", "café\u00a0\t")


def test_opts_tokenizer_is_built_from_its_vocabulary_and_merges(shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "opt"))
    vocabulary = json.loads((shared_data / "opt" / "vocab.json").read_text())
    assert len(tokenizer) == len(vocabulary) == 50_265
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    # From the vocabulary file, where Ġ is a space.
    assert tokenizer("Hello world")["input_ids"] == [2, vocabulary["Hello"], vocabulary["Ġworld"]]
    assert tokenizer(" world", add_special_tokens=False)["input_ids"] == [vocabulary["Ġworld"]]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    padded = tokenizer(["Hello world", "Hello"], padding=True)
    assert padded["input_ids"][1] == [1, 2, vocabulary["Hello"]]
    assert padded["attention_mask"][1] == [0, 1, 1]


def test_opts_tokenizer_reloads_unchanged_from_a_checkpoint(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "opt"))
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert again.padding_side == "left"
        assert again(list(TEXTS))["input_ids"] == tokenizer(list(TEXTS))["input_ids"]
        assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (2, 2, 1)


def test_another_vocabulary_is_not_mistaken_for_opts(shared_data: Path, tmp_path: Path) -> None:
    shutil.copy(shared_data / "opt" / "merges.txt", tmp_path)
    for content in ('{"a": 0, "b": 1}', "[1, 2]", "not JSON"):
        (tmp_path / "vocab.json").write_text(content)
        with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
            load_tokenizer(str(tmp_path))


def test_the_error_names_what_is_neither_a_folder_nor_a_hub_name() -> None:
    with pytest.raises(ConfigError, match="'/nowhere' has no tokenizer that can be loaded"):
        load_tokenizer("/nowhere")
