"""Training under schedules in a user's own Trainer, TRL's among them, is the training of `train.py`."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from forked_python import run_python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from data.batches import encode_pairs
from data.task import Example
from skipdecode import ConfigError, load, skip_generate
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.training import Objective, PromptCompletionCollator, SkipTrainingMixin, step_loss
from skipdecode.training.layer_order import choose_rows, find_order
from train.trainer import SkipTrainer

pytest.importorskip("trl", reason="TRL isn't installed: pip install 'skipdecode[trl]'")

from own_trainer import (
    SCHEDULES,
    Gradients,
    SkipSFTTrainer,
    config,
    conversations,
    own_model,
    own_tokenizer,
    prompt_completions,
)
from trl import SFTTrainer

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "own_trainer.py"
EXAMPLE = SCRIPT.parents[2] / "scripts" / "examples" / "sft_with_trl.py"
OBJECTIVE = Objective(depth_weight_power=-0.5, label_smoothing=0.1, distillation=0.3)
MACHINE = {"tokens_per_second", "peak_memory_gib", "layer_column_share"}  # the last one depends on the padding
DATASETS = {"prompt-completion": prompt_completions(64), "conversations": conversations([2, 3, 3] * 8)}


def pairs(dataset: Dataset) -> list[tuple[str, str]]:
    """The prompt and the completion of every answer, as texts."""
    if "messages" not in dataset.column_names:
        return [(row["prompt"], row["completion"]) for row in dataset]
    rendered = own_tokenizer().apply_chat_template
    return [
        (rendered(messages[:turn], tokenize=False, add_generation_prompt=True), messages[turn]["content"])
        for messages in dataset["messages"]
        for turn in range(1, len(messages), 2)
    ]


def rows_of_train_py(dataset: Dataset) -> Dataset:
    examples = [Example(str(n), prompt, (answer,)) for n, (prompt, answer) in enumerate(pairs(dataset))]
    return Dataset.from_dict(encode_pairs(own_tokenizer(), examples, max_prompt_tokens=99, max_completion_tokens=99))


def first_step(trainer: Trainer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """What the first step logs, and its gradients."""
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return trainer.state.log_history[0], gradients.first


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], closeness: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=closeness, msg=name)


@pytest.mark.parametrize("kind", DATASETS)
def test_a_step_of_trls_trainer_under_schedules_is_that_of_train_py(kind: str, tmp_path: Path) -> None:
    """In one step, all 64 rows under all schedules, divided into batches in other ways and padded differently."""
    usual: dict[str, Any] = {"schedules": SCHEDULES, "sampling": "all", "objective": OBJECTIVE}
    tokenizer = own_tokenizer()
    arguments = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "max_steps": 1,
        "learning_rate": 1e-3,
    }
    sft = SkipSFTTrainer(
        own_model(),
        args=config(tmp_path / "sft", **arguments, assistant_only_loss=kind == "conversations"),
        train_dataset=DATASETS[kind],
        processing_class=tokenizer,
        **usual,
    )
    rows = rows_of_train_py(DATASETS[kind])
    assert len(rows) == len(sft.train_dataset) == 64
    mine = SkipTrainer(
        model=own_model(),
        args=TrainingArguments(
            str(tmp_path / "train"),
            per_device_train_batch_size=64,
            max_steps=1,
            logging_steps=1,
            max_grad_norm=0.0,
            learning_rate=1e-3,
            train_sampling_strategy="group_by_length",
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        **usual,
    )
    assert sft.skip_config == mine.skip_config
    (found, gradients), (expected, reference) = first_step(sft), first_step(mine)
    assert found.keys() == expected.keys()
    for name in expected.keys() - MACHINE:
        assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    assert {"layers_per_token", "speedup_target"} <= expected.keys()
    check_equal(gradients, reference)
    # And a loop of the user's own, over all rows at once.
    model = own_model()
    batch = PromptCompletionCollator(0)(list(sft.train_dataset))
    loss = step_loss(model, batch, SCHEDULES, OBJECTIVE)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    check_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, reference)


@pytest.mark.parametrize("kind", DATASETS)
def test_at_full_depth_the_step_is_that_of_trl_itself(kind: str, tmp_path: Path) -> None:
    def step(trainer_class: Any, **settings: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        dataset = DATASETS[kind]
        only = {"assistant_only_loss": kind == "conversations", "per_device_train_batch_size": len(dataset)}
        # The mixin's batches are of answers, of which conversations have 64 / 24.
        only["gradient_accumulation_steps"] = -(-len(pairs(dataset)) // len(dataset)) if settings else 1
        args = config(tmp_path / trainer_class.__name__, **only, max_steps=1)
        trainer = trainer_class(
            own_model(), args=args, train_dataset=dataset, processing_class=own_tokenizer(), **settings
        )
        return first_step(trainer)

    (found, gradients), (expected, reference) = step(SkipSFTTrainer, speedups=(1,)), step(SFTTrainer)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    check_equal(gradients, reference, 5e-6)  # TRL runs the history of several answers once


def run(folder: Path, processes: int = 1, **settings: Any) -> int:
    return run_python([str(SCRIPT), str(folder), json.dumps(settings)], folder.parent / "log", processes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process to its end."""
    folder = tmp_path_factory.mktemp("own") / "whole"
    assert run(folder, rows=8) == 0, (folder.parent / "log").read_text()
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in json.loads((folder / "state.json").read_text())["log_history"] if "loss" in line]


def test_two_processes_train_the_same_steps_as_one(whole: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "two", processes=2, rows=4) == 0, (tmp_path / "log").read_text()
    assert losses(tmp_path / "two") == pytest.approx(losses(whole), abs=1e-5)
    assert len(losses(whole)) == 6


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    assert run(folder, rows=8, kill_after=4) == -9
    assert not (folder / "model.safetensors").exists()
    assert run(folder, rows=8) == 0, (tmp_path / "log").read_text()
    found, expected = (load_file(each / "model.safetensors") for each in (folder, whole))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_checkpoint_decodes_at_each_trained_speed_with_and_without_this_package(whole: Path) -> None:
    model, tokenizer = load(str(whole))
    trained = SkipConfig.load(whole)
    assert trained is not None
    assert list(trained.schedules.values()) == SCHEDULES
    inputs = tokenizer(
        ["user : w1 w2\nassistant : ", "user : w3 w4 w5\nassistant : "], padding=True, return_tensors="pt"
    )
    plain = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-6")
    fixed: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    outputs = []
    for speedup, schedule in trained.schedules.items():
        expected = plain.generate(**inputs, custom_generate=skip_generate, schedule=schedule, **fixed)
        assert torch.equal(model.generate(**inputs, custom_generate=skip_generate, speedup=speedup, **fixed), expected)
        carried = {"custom_generate": str(whole / "checkpoint-6"), "trust_remote_code": True}
        assert torch.equal(plain.generate(**inputs, **carried, speedup=speedup, **fixed), expected)
        outputs.append(expected)
    assert not torch.equal(outputs[0], outputs[2])
    assert AutoTokenizer.from_pretrained(whole).chat_template == own_tokenizer().chat_template


def test_the_example_trains_a_model_that_decodes_at_its_speeds(tmp_path: Path) -> None:
    own_model().save_pretrained(tmp_path / "model")
    own_tokenizer().save_pretrained(tmp_path / "model")
    DATASETS["conversations"].to_json(tmp_path / "chats.jsonl")
    words = [str(EXAMPLE), *(str(tmp_path / name) for name in ("model", "chats.jsonl", "trained")), "2"]
    assert run_python(words, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    config = SkipConfig.load(tmp_path / "trained")
    assert config is not None
    assert list(config.schedules) == [1, 2, 3]
    assert len(EXAMPLE.read_text().splitlines()) <= 40


@pytest.mark.parametrize(
    ("changes", "passed", "message"),
    [
        ({"packing": True}, {}, "packing is True: layer skipping needs batches with one prompt and one completion"),
        ({"padding_free": True, "max_length": None}, {}, "padding_free is True: layer skipping needs"),
        ({"completion_only_loss": False}, {}, "completion_only_loss is False: layer skipping trains completions alone"),
        ({"loss_type": "dft"}, {}, "loss_type is 'dft': layer skipping computes the loss itself"),
        ({"label_smoothing_factor": 0.1}, {}, r"label_smoothing_factor is 0.1: .+pass objective=Objective\(...\)"),
        ({"torch_compile": True}, {}, r"torch_compile is True: it compiles the whole model.+layer.compile\(\)"),
        ({}, {"data_collator": len}, "data_collator is a builtin_function_or_method: layer skipping needs batches"),
        ({}, {"compute_metrics": len}, "compute_metrics was passed: validation gives the loss at each target alone"),
        ({}, {"train_dataset": Dataset.from_dict({"text": ["w1 w2"]})}, "row 0 trains its first token, so it has no"),
        ({}, {"train_dataset": conversations([1])}, "row 0 trains its first token.+with assistant_only_loss=True"),
        ({}, {"teacher": torch.nn.Linear(1, 1)}, "teacher and objective.frozen_teacher go together"),
        ({}, {"default_speedup": 9}, "default_speedup is 9: it must lie between 1 and 2"),
        ({}, {"speedups": None}, "schedules need exactly one of speedups"),
        ({}, {"objective": Objective(exits=True)}, "objective.exits trains exits in one pass at full depth: it needs"),
        ({}, {"sampler": object()}, "sampler and skip_config go together, in place of speedups and schedules"),
        ({}, {"sampler": object(), "skip_config": object()}, "in place of speedups and schedules"),
    ],
)
def test_what_breaks_the_layout_or_would_have_no_effect_is_refused_before_training(
    changes: dict[str, Any], passed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    usual = {"train_dataset": DATASETS["prompt-completion"], "processing_class": own_tokenizer(), "speedups": (1, 2)}
    with pytest.raises(ConfigError, match=message):
        SkipSFTTrainer(own_model(), args=config(tmp_path, **changes), **{**usual, **passed})


def test_a_plain_trainer_trains_and_validates_rows_in_a_list(tmp_path: Path) -> None:
    rows: Sequence[dict[str, Any]] = rows_of_train_py(DATASETS["prompt-completion"]).to_list()
    masked = [
        {
            "input_ids": row["prompt_ids"] + row["completion_ids"],
            "completion_mask": [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"]),
        }
        for row in rows
    ]
    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", eval_steps=2)
    args.eval_strategy = "steps"
    histories = []
    for dataset in (rows, masked):
        trainer = SkipTrainingMixin(
            own_model(),
            copy.deepcopy(args),
            train_dataset=dataset,
            eval_dataset=dataset[:8],
            speedups=(1, 2),
            order="auto",
        )
        trainer.train()
        histories.append(trainer.state.log_history[0])
    assert {"eval_loss", "eval_loss_1x", "eval_loss_2x"} <= histories[0].keys()
    assert [h["eval_loss_2x"] for h in histories] == pytest.approx([histories[0]["eval_loss_2x"]] * 2)
    assert trainer.skip_config.horizon == 7  # the median completion, with its end token
    order = find_order(own_model(), choose_rows(rows, 64, seed=args.seed)).order
    assert trainer.sampler.schedules[1].order == order
