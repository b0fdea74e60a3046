"""Train 20 steps with the mixin of an installed wheel: `python train_with_mixin.py` in the wheel's environment.

Exits with an error where the loss doesn't fall, or where the checkpoint doesn't decode at its trained speeds.
"""

import importlib.util
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import skipdecode
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.training import Objective, SkipTrainingMixin

assert [name for name in ("datasets", "trl", "peft") if importlib.util.find_spec(name)] == []
torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=6, **shape))
# As TRL tokenises them: each completion counts on from its prompt.
rows = [
    {"input_ids": [*range(n, n + 4), *range(n + 4, n + 10)], "completion_mask": [0] * 4 + [1] * 6} for n in range(64)
]
with tempfile.TemporaryDirectory() as folder:
    trainer = SkipTrainingMixin(
        model,
        TrainingArguments(folder, max_steps=20, learning_rate=1e-3, logging_steps=1, save_steps=20, use_cpu=True),
        train_dataset=rows,
        speedups=(1, 2, 3),
        sampling="sandwich",
        objective=Objective(distillation=0.3),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0], losses
    checkpoint = Path(folder) / "checkpoint-20"
    trained, config = LlamaForCausalLM.from_pretrained(checkpoint), SkipConfig.load(checkpoint)
    assert config is not None
    for speedup, schedule in config.schedules.items():
        options = {"do_sample": False, "max_new_tokens": 6, "inputs": torch.tensor([rows[5]["input_ids"][:4]])}
        carried = {"custom_generate": str(checkpoint), "trust_remote_code": True, "speedup": speedup}
        expected = trained.generate(**options, custom_generate=skipdecode.skip_generate, schedule=schedule)
        assert torch.equal(trained.generate(**options, **carried), expected), speedup
print(Path(skipdecode.__file__).parent)
