"""Decode with the compiled kernels of an installed wheel: `python decode_with_kernels.py` in the wheel's environment.

Exits with an error where the kernels are missing, or where their tokens aren't those of torch's operators.
"""

import importlib.metadata
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import skipdecode
from skipdecode.kernels.cpu import kernels

compiled = kernels()
assert compiled is not None, "the wheel has no compiled kernels that this machine can load"
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=6, initializer_range=0.3, **shape)).eval()
schedule = skipdecode.SkipSchedule(num_layers=6, max_layers=4, min_layers=2, horizon=8)
inputs = {"input_ids": torch.randint(96, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}


def decoded(weights: str) -> torch.Tensor:
    options = {"schedule": schedule, "weights": weights, "max_new_tokens": 12, "do_sample": False}
    return model.generate(**inputs, custom_generate=skipdecode.skip_generate, **options)


assert torch.equal(decoded("packed"), decoded("model")), "the kernels' tokens aren't those of the model's forward pass"
assert decoded("int4").shape[1] > 5  # decoding in 4 bits exists in the kernels alone
print(Path(skipdecode.__file__).parent, importlib.metadata.version("skipdecode"), compiled.name)
