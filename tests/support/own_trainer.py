"""TRL's SFTTrainer under schedules on a tiny model, as a user's script has it: `own_trainer.py FOLDER SETTINGS`.

The settings are JSON: the number of rows of a batch, and the step after whose checkpoint the process kills itself.
"""

import copy
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny_models import randomised, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from skipdecode import SkipSchedule
from skipdecode.training import SkipTrainingMixin

WORDS = [f"w{number}" for number in range(50)]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "assistant : {% generation %}{{ message.content }}<eos>{% endgeneration %}\n"
    "{% else %}user : {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
# Each is at a speedup of its own; prompts skip layers too.
SCHEDULES = [
    SkipSchedule.full_depth(6),
    SkipSchedule(6, 5, 3, horizon=4, prompt="max"),
    SkipSchedule(6, 3, 2, horizon=5, prompt="max"),
]


class SkipSFTTrainer(SkipTrainingMixin, SFTTrainer):
    pass


def own_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with a chat template that marks the answers."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "user", "assistant", ":", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    found.chat_template = TEMPLATE
    return found


def own_model() -> PreTrainedModel:
    special = {"vocab_size": 55, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return randomised(tiny_config("llama", intermediate_size=48, num_key_value_heads=2, **special), seed=0)


def prompt_completions(rows: int) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list(
        [{"prompt": f"{_words(draw, 2, 9)} ", "completion": _words(draw, 2, 9)} for _ in range(rows)]
    )


def conversations(turns: list[int]) -> Dataset:
    """A conversation for each number of turns, each of a question and an answer."""
    draw = random.Random(1)
    roles = ("user", "assistant")
    return Dataset.from_list(
        [
            {"messages": [{"role": role, "content": _words(draw, 2, 5)} for _ in range(count) for role in roles]}
            for count in turns
        ]
    )


def _words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))


def config(folder: Path, **changes: Any) -> SFTConfig:
    """The arguments of a short run on a CPU in float32."""
    usual = {"use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1, "max_grad_norm": 0.0}
    return SFTConfig(str(folder), **{**usual, "disable_tqdm": True, "save_strategy": "no", **changes})


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.first:
            named = kwargs["model"].named_parameters()
            self.first = {name: copy.deepcopy(parameter.grad) for name, parameter in named}


class KilledAfter(TrainerCallback):
    """Kills the process at once where the checkpoint of a step was saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, rows: int, kill_after: int | None = None) -> None:
    steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "learning_rate": 1e-2}
    trainer = SkipSFTTrainer(
        own_model(),
        args=config(folder, per_device_train_batch_size=rows, assistant_only_loss=True, **steps),
        train_dataset=conversations([2, 3, 3] * 4),
        processing_class=own_tokenizer(),
        callbacks=[] if kill_after is None else [KilledAfter(kill_after)],
        schedules=SCHEDULES,
        sampling="sandwich",
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    trainer.save_model()
    if trainer.args.should_save:
        trainer.state.save_to_json(str(folder / "state.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
