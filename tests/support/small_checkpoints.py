"""Folders of tiny random models with a tokenizer and a task, as a finished run leaves them, in no time."""

import shutil
from pathlib import Path
from typing import Any

from tiny_models import randomised
from transformers import AutoConfig

from data import load_task
from data.vocabulary import train_tokenizer
from skipdecode.checkpoint.skip_config import SkipConfig

TASK = {"train_size": 40, "validation_size": 6, "test_size": 14}


def save_checkpoint(folder: Path, num_layers: int, *, vocab_size: int = 320, seed: int = 0, **config: Any) -> Path:
    """A random OPT for the task `departures`, whose texts are noise and end when they end."""
    tokenizer = train_tokenizer(load_task("departures", **TASK).stream("train"), vocab_size, 128)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": num_layers,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dropout": 0.0,
        **config,
    }
    randomised(AutoConfig.for_model("opt", **shape), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    SkipConfig(solver={"horizon": 8}, task={"name": "departures", "options": TASK}).save(folder)
    return folder


def in_hub_cache(folder: Path, cache: Path, name: str) -> Path:
    """A copy of a folder where the Hub's cache would hold it as a repository; returns its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = Path(shutil.copytree(folder, repository / "snapshots" / ("0" * 40)))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return snapshot


def flip(file: Path, at: float = 0.5) -> None:
    """Change a bit of a file, so far into it."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1
    file.write_bytes(content)
