"""Write a Llama model as a GGUF file for llama.cpp."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from skipdecode import ConfigError

if TYPE_CHECKING:
    import gguf


def write_gguf(model: PreTrainedModel, path: Path, quantization: str) -> None:
    """Write the weights of a model, with all matrices quantized alike, including the embedding and the LM head.

    The file has no tokenizer: llama.cpp is given token ids.

    Args:
        model: a Llama model of transformers.
        path: the file to write.
        quantization: a ggml type, such as `Q8_0`, `Q4_0` or `F32`.

    Raises ConfigError for sizes that aren't multiples of the quantization group.
    """
    import gguf  # an optional dependency

    config = model.config
    matrices, vectors = gguf.GGMLQuantizationType[quantization], gguf.GGMLQuantizationType.F32
    group, _ = gguf.GGML_QUANT_SIZES[matrices]
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp uses the embedding instead
        weight = tensor.detach().float().cpu().numpy()
        if (projection := name.split(".")[-2]) in heads:
            weight = _interleave_halves(weight, heads[projection])
        kind = matrices if weight.ndim > 1 else vectors
        if kind == matrices and weight.shape[-1] % group:
            raise ConfigError(f"{name} has {weight.shape[-1]} inputs: {quantization} needs a multiple of {group}")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name  # all tensors of a Llama have a name in GGUF
        writer.add_tensor(target, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: "gguf.GGUFWriter", model: PreTrainedModel) -> None:
    config = model.config
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3"):  # the others depend on the length, or scale attention
        raise ConfigError(
            f"--peers llama.cpp: rope_type is {rope['rope_type']}, only default, linear and llama3 are supported"
        )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if rope["rope_type"] != "default":  # the factors that llama.cpp divides default frequencies by
        found = model.get_decoder().rotary_emb.inv_freq.float().cpu()
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / found).numpy().astype(np.float32))


def _interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows of a query or key projection, [heads x head size, …], into the order of llama.cpp.

    llama.cpp rotates pairs of adjacent rows of a head; transformers rotates row i of the first half with row i of the
    second.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    interleaved: np.ndarray = halves.swapaxes(1, 2).reshape(weight.shape)
    return interleaved
