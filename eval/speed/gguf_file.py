"""A Llama model as a GGUF file, which llama.cpp reads."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from skipdecode import ConfigError

if TYPE_CHECKING:
    import gguf


def write_gguf(model: PreTrainedModel, path: Path, quantization: str) -> None:
    """Write a model's weights, every matrix quantised alike: also the embedding and the head, so that bytes compare.

    Without a tokenizer: llama.cpp is given token ids.

    Args:
        model: a Llama of transformers.
        path: of the file.
        quantization: a name of ggml's, such as `Q8_0`, `Q4_0` or `F32`.

    Raises ConfigError for sizes that don't fall into the groups of the quantisation.
    """
    import gguf  # here: of an extra

    config = model.config
    matrices, vectors = gguf.GGMLQuantizationType[quantization], gguf.GGMLQuantizationType.F32
    group, _ = gguf.GGML_QUANT_SIZES[matrices]
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding where there is none
        weight = tensor.detach().float().cpu().numpy()
        if (projection := name.split(".")[-2]) in heads:
            weight = _interleave_halves(weight, heads[projection])
        kind = matrices if weight.ndim > 1 else vectors
        if kind == matrices and weight.shape[-1] % group:
            raise ConfigError(f"{name} has {weight.shape[-1]} inputs: {quantization} needs a multiple of {group}")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name  # a Llama has no others
        writer.add_tensor(target, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: "gguf.GGUFWriter", model: PreTrainedModel) -> None:
    config = model.config
    rope = config.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3"):  # the others change with the length, or scale too
        raise ConfigError(
            f"llama.cpp is no peer here where rope_type is {rope['rope_type']}: default, linear or llama3"
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
    if rope["rope_type"] != "default":  # what plain frequencies are divided by
        found = model.get_decoder().rotary_emb.inv_freq.float().cpu()
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / found).numpy().astype(np.float32))


def _interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, [heads x head size, …], in the order of llama.cpp.

    It turns each pair of neighbours in a head; transformers turns row i of the first half with row i of the second.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    interleaved: np.ndarray = halves.swapaxes(1, 2).reshape(weight.shape)
    return interleaved
