"""A shallow model computes the same as the full model that skips its layers, and is a plain checkpoint."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fastpath_cases import fresh
from hypothesis import given
from hypothesis import strategies as st
from naive_opt import naive_logits
from small_runs import SMALL, small_recipe, train_small
from tiny_models import TINY_FAMILIES, ragged_prompts, randomised, tiny_config
from transformers import AutoModelForCausalLM

from skipdecode import ConfigError, SkipSchedule, skip_generate, skip_layers
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.families import decoder_layers
from skipdecode.schedule.schedule import Placement
from train.build import build_model, build_task, model_config
from train.recipe import load_recipe
from train.shallow import kept_layers, shrink_model

LAYERS = 6


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_even_placement_keeps_evenly_spaced_layers_with_the_first_and_the_last(sizes: tuple[int, int]) -> None:
    num_layers, keep = sizes
    kept = kept_layers(num_layers, keep)
    assert len(set(kept)) == keep
    assert list(kept) == sorted(kept)
    assert kept[0] == 0
    assert keep == 1 or kept[-1] == num_layers - 1
    gaps = {after - before for before, after in pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("placement", "kept"),
    [
        (None, (0, 2, 3, 5)),
        ("even", (0, 2, 3, 5)),
        ("top", (0, 3, 4, 5)),
        ("bottom", (0, 1, 2, 3)),
        ("ends", (0, 1, 4, 5)),
        ("order", (0, 1, 3, 5)),
    ],
)
@pytest.mark.parametrize("family", ["opt", "opt-350m"])
def test_a_shallow_models_logits_equal_those_of_a_naive_model_of_its_layers(
    family: str, placement: Placement | None, kept: tuple[int, ...]
) -> None:
    class Kept:
        """The part of a schedule that the reference needs: every position runs the kept layers."""

        num_layers, prompt_layers, prompt_stop = LAYERS, kept, None

        def layers_at(self, step: int) -> tuple[int, ...]:
            return kept

    model = fresh(family)
    ids, mask = ragged_prompts([5, 9], seed=1)
    with torch.no_grad():
        expected = naive_logits(model, ids, mask, 4, Kept())  # type: ignore[arg-type]
        shrink_model(model, len(kept), placement, (0, 5, 1, 3, 2, 4) if placement == "order" else None)
        found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["opt", "opt-350m", *TINY_FAMILIES])
@pytest.mark.parametrize("keep", [1, 4])
def test_a_shallow_models_logits_equal_those_of_the_full_model_that_skips_the_same_layers(
    family: str, keep: int
) -> None:
    model = fresh(family)
    ids, mask = ragged_prompts([5, 9], seed=1)
    schedule = SkipSchedule(LAYERS, keep, keep, placement="even", prompt="max")
    with torch.no_grad(), skip_layers(model, schedule, prompt_columns=4):
        expected = model(ids, attention_mask=mask).logits
    shrink_model(model, keep)
    assert len(decoder_layers(model)) == keep
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["opt", "opt-350m", "gpt2", "llama", "mistral", "qwen2"])
def test_a_shallow_model_reloads_and_generates_the_same_in_plain_transformers(family: str, tmp_path: Path) -> None:
    model = fresh(family)
    ids, mask = ragged_prompts([5, 9], seed=1)
    settings = {"max_new_tokens": 8, "do_sample": False}
    schedule = SkipSchedule(LAYERS, 3, 3, placement="even", prompt="max")
    expected = model.generate(ids, attention_mask=mask, custom_generate=skip_generate, schedule=schedule, **settings)
    shrink_model(model, 3)
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings), expected)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["n_layer" if family == "gpt2" else "num_hidden_layers"] == 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(ids, attention_mask=mask, **settings), expected)
    full = SkipSchedule.full_depth(3)
    made = again.generate(ids, attention_mask=mask, custom_generate=skip_generate, schedule=full, **settings)
    assert torch.equal(made, expected)


def test_kept_layers_keep_their_own_attention_type(tmp_path: Path) -> None:
    """Qwen2's upper layers use sliding-window attention."""
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    model = randomised(tiny_config("qwen2", **TINY_FAMILIES["qwen2"], **windows), seed=2)
    ids, mask = ragged_prompts([12, 12], seed=1)
    schedule = SkipSchedule(LAYERS, 3, 3, placement="even", prompt="max")
    with torch.no_grad(), skip_layers(model, schedule, prompt_columns=4):
        expected = model(ids, attention_mask=mask).logits
    shrink_model(model, 3)
    assert model.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        with torch.no_grad():
            torch.testing.assert_close(one(ids, attention_mask=mask).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_shallow_model_keeps_the_pretrained_weights_of_its_layers(trained: Path) -> None:
    start = ["model.shape=null", f"model.name_or_path={trained}", "model.config=null"]
    recipe = small_recipe(*start, "model.layers=3", "model.dtype=float32")
    shallow, _ = build_model(recipe, [])
    assert model_config(recipe).num_hidden_layers == shallow.config.num_hidden_layers == 3
    original = AutoModelForCausalLM.from_pretrained(trained)
    for name, value in shallow.state_dict().items():
        old = name
        for number, layer in enumerate((0, 3, 7)):
            old = old.replace(f"layers.{number}.", f"layers.old{layer}.")
        assert torch.equal(value, original.state_dict()[old.replace("old", "")]), name
    unmerged = small_recipe(*start, "model.layers=3", "lora.r=2", "lora.merge=false")
    with pytest.raises(ConfigError, match=r"model\.layers is 3 with lora\.merge=false"):
        build_model(unmerged, [])
    changed = ["model.config={activation_function: gelu}", "lora.r=2", "lora.merge=false"]
    with pytest.raises(ConfigError, match=r"model\.config is .*gelu.* with lora\.merge=false"):
        build_model(small_recipe(*start, *changed), [])


def test_a_shallow_shape_is_saved_with_its_number_of_layers(tmp_path: Path) -> None:
    recipe = small_recipe("model.layers=3", "schedule.speedups=[1]")
    build_model(recipe, build_task(recipe).load("train"))[0].save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_hidden_layers == len(decoder_layers(model)) == 3
    assert model_config(recipe).num_hidden_layers == 3


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        (("schedule.speedups=[1,3]",), 8),  # SkipDecode
        (("schedule.speedups=[1,3]", "schedule.placement=bottom"), 8),  # early termination
        (("schedule.speedups=[1,3]", "schedule.placement=even", "schedule.decay=constant"), 8),  # Unified
        (("schedule.speedups=[1]", "model.layers=3", "model.keep=top"), 3),  # shallow
    ],
)
def test_every_method_can_start_from_a_trained_model(
    changes: tuple[str, ...], layers: int, trained: Path, tmp_path: Path
) -> None:
    start = ["model.shape=null", f"model.name_or_path={trained}", "model.config=null", "train.max_steps=1"]
    # The learning rate is so small that the loaded weights are the saved ones.
    folder = train_small(tmp_path / "run", *start, "optim.learning_rate=1.0e-12", "schedule.texts=0", *changes)
    found, before = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, trained))
    kept = decoder_layers(before)
    numbers = (0, 6, 7) if layers == 3 else range(8)
    assert len(decoder_layers(found)) == layers
    for layer, number in zip(decoder_layers(found), numbers, strict=True):
        torch.testing.assert_close(layer.state_dict(), kept[number].state_dict(), rtol=0, atol=1e-6)
    config = SkipConfig.load(folder)
    assert config is not None
    assert {schedule.num_layers for schedule in config.schedules.values()} == {layers}
    asked = dict(change.split("=") for change in changes)
    placements = {schedule.placement for schedule in config.schedules.values()}
    assert placements == {asked.get("schedule.placement", "top")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_small(tmp_path_factory.mktemp("trained") / "run", "train.max_steps=1", "schedule.texts=0")


def test_unknown_placements_and_numbers_of_layers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.keep is 'upper'.*'top', 'bottom', 'even', 'ends' or 'order'"):
        load_recipe("quickstart", ["model.layers=2", "model.keep=upper"])
    with pytest.raises(ConfigError, match=r"model\.layers is 0"):
        load_recipe("quickstart", ["model.layers=0"])
    with pytest.raises(ConfigError, match=r"model\.layers is 9: it must lie between 1 and the model's 8 layers"):
        model_config(load_recipe("quickstart", [*SMALL, "model.layers=9"]))
    model = fresh("opt")
    with pytest.raises(ConfigError, match="model's 6 layers"):
        shrink_model(model, 7)
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == 6


def test_a_model_whose_layers_depend_on_their_index_is_refused() -> None:
    model = fresh("gpt2")
    model.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(ConfigError, match="scale_attn_by_inverse_layer_idx"):
        shrink_model(model, 3)
