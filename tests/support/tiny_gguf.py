"""A tiny Llama with a tokenizer, as a GGUF file like those that llama.cpp's own converter writes."""

import json
from pathlib import Path
from typing import Any

import gguf
from tiny_models import randomised
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from data import load_task
from data.vocabulary import train_tokenizer

NAME = "tiny.gguf"
TITLE = "A Tiny Llama"
CONTROL, NORMAL = 3, 1  # types of tokens


def tiny_llama(num_layers: int = 8) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random Llama, its head tied to its embedding, and a tokenizer of the task `departures`."""
    tokenizer = train_tokenizer(load_task("departures", train_size=40).stream("train"), 320, 256)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return randomised(config, seed=0), tokenizer


def write_tiny_gguf(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, quantization: str = "F32"
) -> Path:
    """The file `tiny.gguf` in a folder, its matrices in a quantisation of ggml's."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / NAME, "llama")
    writer.add_name(TITLE)
    _add_sizes(writer, model.config)
    _add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        weight = tensor.detach().numpy()
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name:  # llama.cpp rotates neighbours, transformers the two halves of a head
                weight = weight.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType[quantization if weight.ndim > 1 else "F32"]
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(weight, kind), raw_dtype=kind
        )
    _close(writer)
    return folder


def write_empty_gguf(path: Path, architecture: str) -> None:
    """A file of an architecture, without weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    _close(writer)


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in tokenizer.all_special_tokens else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
