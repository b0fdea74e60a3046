"""Fine-tune a model in TRL to decode at 1x to 3x: `python scripts/examples/sft_with_trl.py MODEL DATA OUTPUT [STEPS]`.

DATA is a file of JSON lines with `prompt` and `completion`, or with `messages`.
"""

import sys

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from skipdecode.training import Objective, SkipTrainingMixin


class SkipSFTTrainer(SkipTrainingMixin, SFTTrainer): ...


def main(model: str, data: str, output: str, steps: str = "600") -> None:
    dataset = load_dataset("json", data_files=data, split="train")
    trainer = SkipSFTTrainer(
        model,
        args=SFTConfig(
            output,
            max_steps=int(steps),
            learning_rate=1e-4,
            bf16=torch.cuda.is_available(),
            assistant_only_loss="messages" in dataset.column_names,
        ),
        train_dataset=dataset,
        speedups=(1, 2, 3),
        sampling="sandwich",
        order="auto",
        objective=Objective(distillation=0.5),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
