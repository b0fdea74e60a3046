"""A checkpoint without the layers that nothing runs decodes the same tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lean_cases import fresh
from small_checkpoints import save_checkpoint
from tiny_models import TINY_FAMILIES, ragged_prompts

import skipdecode
from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.checkpoint import SkipConfig
from skipdecode.cli import main
from skipdecode.prune import keep_layers, pruned_schedule

PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]


@given(st.data())
def test_the_smaller_schedule_runs_the_same_layers(data: Any) -> None:
    depth = data.draw(st.integers(2, 40))
    most = data.draw(st.integers(1, depth))
    least = data.draw(st.integers(1, most))
    schedule = SkipSchedule(
        depth,
        most,
        least,
        warmup_layers=data.draw(st.integers(1, least)),
        horizon=data.draw(st.integers(1, 30)),
        placement=data.draw(st.sampled_from(["top", "bottom", "ends"])),
        decay=data.draw(st.sampled_from(["linear", "cosine", "exponential"])),
        prompt="max",
    )
    kept, smaller = pruned_schedule(schedule)
    assert smaller.num_layers == len(kept) == most
    for i in range(schedule.horizon + 3):
        assert tuple(kept[n] for n in smaller.layers_at(i)) == schedule.layers_at(i)
    assert tuple(kept[n] for n in smaller.prompt_layers) == schedule.prompt_layers


def test_what_cannot_be_pruned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompts run all 12 layers .*: train with schedule\.prompt=max"):
        pruned_schedule(SkipSchedule(12, 6, 2))
    spread = SkipSchedule(12, 7, 3, placement="even", prompt="max")
    with pytest.raises(ConfigError, match=r"placement is 'even', whose .* are no set of the same placement"):
        pruned_schedule(spread)
    constant = SkipSchedule(12, 4, 4, placement="even", prompt="max")
    assert pruned_schedule(constant)[0] == constant.layers_for(4)


@pytest.mark.parametrize("family", ["opt", "opt-350m", *TINY_FAMILIES])
def test_every_family_decodes_the_same_tokens_without_the_layers(family: str) -> None:
    schedule = SkipSchedule(6, 4, 2, horizon=5, prompt="max")
    ids, mask = ragged_prompts([5, 3], 0)
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    model = fresh(family)
    expected = model.generate(**request, custom_generate=skip_generate, schedule=schedule)
    kept, smaller = pruned_schedule(schedule)
    keep_layers(model, kept)
    assert torch.equal(model.generate(**request, custom_generate=skip_generate, schedule=smaller), expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("prune") / "whole", 6)
    config = SkipConfig.load(folder)
    assert config is not None
    dataclasses.replace(config, solver={**config.solver, "prompt": "max"}).save(folder)
    return folder


def test_an_export_decodes_the_same_and_says_what_it_saved(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    small = tmp_path / "small"
    assert main(["export", str(checkpoint), str(small), "--speedup", "2"]) == 0
    said = capsys.readouterr().out

    def decode(folder: Path) -> torch.Tensor:
        model, tokenizer = skipdecode.load(str(folder))
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        return model.generate(**inputs, custom_generate=skip_generate, speedup=2, max_new_tokens=12)

    assert torch.equal(decode(small), decode(checkpoint))
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (checkpoint, small)]
    model, _ = skipdecode.load(str(small))
    assert f"{model.config.num_hidden_layers} of 6 layers" in said
    share = 1 - sum(p.numel() for p in model.parameters()) / sum(
        p.numel() for p in skipdecode.load(str(checkpoint))[0].parameters()
    )
    assert f"({share:.0%} saved)" in said
    assert share == pytest.approx(1 - sizes[1] / sizes[0], abs=0.02)
    assert (small / "custom_generate" / "generate.py").exists()
    assert main(["export", str(checkpoint), str(small), "--speedup", "2"]) == 2
    assert "isn't empty: name a new folder" in capsys.readouterr().err
    assert not small.with_name("small.partial").exists()
