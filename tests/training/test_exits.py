"""Multi-layer early exit: the loss of one pass equals that of separate models, each truncated after a layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fastpath_cases import fresh
from small_runs import SMALL, metrics, train_small
from tiny_models import PAD, TINY_FAMILIES, VOCABULARY, ragged_prompts
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skipdecode import ConfigError, CostModel, SkipSchedule, skip_generate, skip_layers
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.families import FAMILIES, Family, exit_head, register_family
from skipdecode.training.batch_layout import IGNORED, lay_out
from skipdecode.training.exits import run_exits
from skipdecode.training.objective import DepthBands, Objective, unpack_batch
from train.build import build_task, checkpoint_activations
from train.dry_run.simulation import simulate_step
from train.prepare import make_arguments, prepare
from train.recipe import load_recipe

LAYERS = 6
EXITS = ["optim.exits=all", "schedule.speedups=[1]"]


def a_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in (5, 3, 4)]
    completions = [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in (2, 5, 4)]
    return lay_out(prompts, completions, PAD)


def objective_loss(model: PreTrainedModel, objective: Objective, batch: dict[str, Any], **kwargs: Any) -> torch.Tensor:
    """The loss as the trainer computes it."""
    _, arguments, labels = unpack_batch(batch)

    def run(schedule: SkipSchedule) -> Any:
        return run_exits(model, lambda: model(**{**arguments, "logits_to_keep": 1}), labels.shape[1])

    full = SkipSchedule.full_depth(LAYERS)
    unused: Any = None
    (loss,) = objective.shares([full], labels, unused, unused, run, **kwargs)
    return loss


def naive_loss(model: PreTrainedModel, batch: dict[str, Any], power: float, smoothing: float, share: float) -> Any:
    """One model for each exit, truncated by a schedule, with explicit weights, means and divergences."""
    prompt, arguments, labels = unpack_batch(batch)
    tokens = (labels != IGNORED).sum()
    logits = []
    for k in range(1, LAYERS + 1):
        cut = SkipSchedule(LAYERS, k, k, decay="constant", placement="bottom", prompt="max")
        with skip_layers(model, cut, prompt_columns=prompt):
            logits.append(model(**arguments).logits[:, :-1])
    total: Any = 0.0
    for k, given in enumerate(logits, start=1):
        how = {"ignore_index": IGNORED, "reduction": "sum", "label_smoothing": smoothing}
        loss = functional.cross_entropy(given.transpose(1, 2), labels, **how)
        if k < LAYERS and share:
            p, q = logits[-1].detach().softmax(-1), given.softmax(-1)
            divergence = (p * (p.log() - q.log())).sum(-1)[labels != IGNORED].sum()
            loss = (1 - share) * loss + share * divergence
        total = total + k**power * loss / tokens
    return total / sum(k**power for k in range(1, LAYERS + 1))


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["opt", "opt-350m", *TINY_FAMILIES])
@pytest.mark.parametrize(("power", "smoothing", "share"), [(0.0, 0.0, 0.0), (1.0, 0.1, 0.5)])
def test_loss_and_gradient_equal_those_of_models_truncated_after_each_layer(
    family: str, power: float, smoothing: float, share: float
) -> None:
    model, batch = fresh(family), a_batch()
    hooks = [list(layer._forward_hooks.values()) for layer in model.modules()]
    loss = objective_loss(model, Objective(power, smoothing, share, exits=True), batch)
    assert [list(layer._forward_hooks.values()) for layer in model.modules()] == hooks
    expected = naive_loss(model, batch, power, smoothing, share)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found, wanted = gradients(model, loss), gradients(model, expected)
    assert {name for name, _ in model.named_parameters()} == set(found)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: name + text)


def test_gradient_checkpointing_does_not_change_the_gradient() -> None:
    model, batch, objective = fresh("opt").train(), a_batch(), Objective(1.0, exits=True)
    plain = gradients(model, objective_loss(model, objective, batch))
    checkpoint_activations(model)
    for name, value in gradients(model, objective_loss(model, objective, batch)).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-7)


def test_losses_of_parts_of_a_batch_add_up_to_the_loss_of_the_batch() -> None:
    model, batch, objective = fresh("llama"), a_batch(), Objective(1.0, 0.1, exits=True)
    totals = objective.totals([SkipSchedule.full_depth(LAYERS)], unpack_batch(batch)[2])
    parts = 0.0
    for row in range(3):
        part = {name: value if isinstance(value, int) else value[row : row + 1] for name, value in batch.items()}
        parts += float(objective_loss(model, objective, part, totals=totals))
    assert parts == pytest.approx(float(objective_loss(model, objective, batch)), rel=1e-5)


def test_each_exit_is_logged_in_the_band_of_its_depth() -> None:
    model, batch, bands = fresh("gpt2"), a_batch(), DepthBands(LAYERS)
    objective_loss(model, Objective(exits=True), batch, bands=bands).backward()  # recomputes the exits
    prompt, arguments, labels = unpack_batch(batch)
    losses: dict[str, list[float]] = {}
    for k in range(1, LAYERS + 1):
        with skip_layers(model, SkipSchedule(LAYERS, k, k, placement="bottom", prompt="max"), prompt_columns=prompt):
            given = model(**arguments).logits[:, :-1]
        loss = functional.cross_entropy(given.transpose(1, 2), labels, ignore_index=IGNORED)
        losses.setdefault(bands.name(bands.band(k)), []).append(float(loss))
    assert bands.take() == {name: pytest.approx(sum(v) / len(v), rel=1e-5) for name, v in losses.items()}


def test_a_family_without_a_known_final_norm_is_refused() -> None:
    original = FAMILIES["llama"]
    try:
        register_family("llama", "model.layers")
        with pytest.raises(ConfigError, match="final norm of model_type 'llama' is not known"):
            exit_head(fresh("llama"))
    finally:
        FAMILIES["llama"] = Family(original.layers, original.parts)


def test_a_forward_pass_that_drops_layers_is_refused() -> None:
    model = fresh("opt").train()
    model.model.decoder.layerdrop = 1.0
    with pytest.raises(ConfigError, match=f"0 of {LAYERS} layers ran"):
        objective_loss(model, Objective(exits=True), a_batch())


@pytest.mark.parametrize(
    "overrides", [["schedule.speedups=[1,2]"], ["schedule.speedups=null", "schedule.speedup_range=[1,3]"]]
)
def test_schedules_that_skip_layers_are_refused_when_exits_are_trained(overrides: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*SMALL, "optim.exits=all", *overrides])
    with pytest.raises(ConfigError, match=r"optim\.exits is 'all'.*schedule\.speedups=\[1\]"):
        prepare(recipe, build_task(recipe), make_arguments(recipe, tmp_path))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits") / "run"
    return train_small(folder, *EXITS, "optim.depth_weight_power=1", "train.max_steps=2")


def test_a_run_with_exits_logs_every_band_in_each_step(finished: Path) -> None:
    for line in metrics(finished):
        bands = {f"loss_layers_{low}_to_{low + 1}" for low in (1, 3, 5, 7)}
        assert {name for name in line if name.startswith("loss_")} == bands
        assert line["layer_column_share"] == 1
        assert line["layers_per_token"] == 8


def test_a_checkpoint_with_exits_decodes_other_targets_at_a_fixed_exit(finished: Path) -> None:
    config = SkipConfig.load(finished)
    assert config is not None
    model = AutoModelForCausalLM.from_pretrained(finished)
    cost = CostModel.of(model)
    assert set(config.schedules) == {1.0}
    assert config.plan_for(cost, 1).schedule.min_layers == 8
    for speedup in (2, 3, 4):
        schedule = config.plan_for(cost, speedup).schedule
        assert (schedule.decay, schedule.placement) == ("constant", "bottom")
        assert {schedule.layers_at(i) for i in range(100)} == {tuple(range(schedule.max_layers))}
        assert cost.at().speedup(schedule) >= speedup > cost.at().speedup(one_layer_more(schedule))
        ids, mask = ragged_prompts([4, 6], seed=0)
        made = {"custom_generate": skip_generate, "schedule": schedule, "max_new_tokens": 3, "do_sample": False}
        assert model.generate(ids, attention_mask=mask, **made).shape[1] > 6


def one_layer_more(schedule: SkipSchedule) -> SkipSchedule:
    more = schedule.max_layers + 1
    return SkipSchedule.from_dict({**schedule.to_dict(), "max_layers": more, "min_layers": more})


def test_the_memory_of_a_step_holds_the_logits_of_one_exit_at_a_time() -> None:
    """A vocabulary that outweighs everything else."""
    shape = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_attention_heads": 2, "dropout": 0.0}

    def activations(layers: int, *, exits: bool) -> int:
        recipe = load_recipe("quickstart", ["train.per_device_batch_size=4", *(EXITS if exits else [])])
        config = AutoConfig.for_model("opt", vocab_size=30000, num_hidden_layers=layers, **shape)
        full_depth = [SkipSchedule.full_depth(layers)]
        return simulate_step(recipe, config, full_depth, prompt_columns=8, new_tokens=16).peak(0)

    assert activations(12, exits=True) < 1.1 * activations(3, exits=True)
    assert activations(12, exits=True) < 1.5 * activations(12, exits=False)
