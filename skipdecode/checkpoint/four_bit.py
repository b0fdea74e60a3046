"""Models with projections in 4 bits, as QLoRA's base (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_accelerate_available, is_bitsandbytes_available

from skipdecode.errors import ConfigError
from skipdecode.families import unwrap


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """How a base model is loaded in 4 bits: QLoRA's data type NF4, its scales quantised too (double quantisation).

    All linear projections are stored so, except the LM head. They are dequantised to `dtype` for each computation.

    Args:
        dtype: data type of the computation; that of the weights that aren't in 4 bits, which it would change otherwise.

    Raises:
        ConfigError: where bitsandbytes isn't installed.
    """
    if not (is_accelerate_available() and is_bitsandbytes_available()):
        raise ConfigError("weights in 4 bits (nf4) need bitsandbytes: pip install 'skipdecode[qlora]'")
    # When it is imported, it warns that a kernel which `keep_exact` turns off isn't there.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def base_weights(model: nn.Module) -> dict[str, str] | None:
    """How the base of adapters was loaded in 4 bits, for `SkipConfig.base_weights`; None where it is as it is stored.

    Args:
        model: the base, wrapped or not.

    Raises:
        ConfigError: where `nf4` wouldn't give the same weights again.
    """
    base: Any = unwrap(model)
    if not getattr(base, "is_loaded_in_4bit", False) or base.hf_quantizer.pre_quantized:
        return None
    config = base.config.quantization_config
    for name, needed in (
        ("bnb_4bit_quant_type", "nf4"),
        ("bnb_4bit_use_double_quant", True),
        ("llm_int8_skip_modules", None),
    ):
        value = getattr(config, name)
        if value != needed:
            raise ConfigError(
                f"the base model was loaded in 4 bits with {name}={value!r}: it must be {needed!r}, as the checkpoint "
                "couldn't be loaded with the weights that it was trained on"
            )
    return {"quantize": "nf4", "dtype": str(config.bnb_4bit_compute_dtype).removeprefix("torch.")}


def keep_exact(model: Any) -> None:
    """Turn off bitsandbytes' kernel for inference on CPUs with AVX512-BF16.

    It stores the weights anew, with scales rounded to bfloat16, as soon as a model in evaluation mode runs. They would
    no longer be those that the adapters were trained on, and training that continues would silently lose gradients.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def stored_values(parameter: torch.Tensor) -> torch.Tensor:
    """Values of a parameter that aren't finite if a weight isn't: of one in 4 bits its scales, else the parameter."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter
    scales: torch.Tensor = state.offset if state.nested else state.absmax  # the offset is the mean of all scales
    return scales


def dequantise(model: Any) -> None:
    """Replace a model's projections in 4 bits, in place, by plain ones of the same values, in main memory.

    transformers' own `dequantize` doesn't restore GPT-2's transposed projections.
    """
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    for name, module in list(model.named_modules()):
        if getattr(getattr(module, "weight", None), "quant_state", None) is None:
            continue
        weight = dequantize_bnb_weight(module.weight).to("cpu", module.compute_dtype)  # [out, in]
        outputs, inputs = weight.shape
        plain: Any
        with torch.device("meta"):
            if module.source_cls is Conv1D:
                plain, weight = Conv1D(outputs, inputs), weight.T.contiguous()
            else:
                plain = nn.Linear(inputs, outputs, bias=module.bias is not None)
        plain.weight, plain.bias = nn.Parameter(weight), module.bias
        model.set_submodule(name, plain)
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_4bit = False
    model.to("cpu")
