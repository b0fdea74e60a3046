"""LayerSkip's layer dropout and its loss of exits that take turns (arXiv 2404.16710)."""

import pytest
import torch
from fastpath_cases import fresh
from torch.nn import functional

from skipdecode.families import decoder_layers
from skipdecode.training.batch_layout import IGNORED
from skipdecode.training.exits import Exits
from skipdecode.training.layer_dropout import add_layer_dropout, dropout_rates
from skipdecode.training.objective import Objective, layerskip_weights


@pytest.mark.parametrize("every", [1, 2, 3, 8])
def test_in_as_many_steps_as_exits_take_turns_each_has_its_loss_once_and_the_last_one_always(every: int) -> None:
    depth = 6
    turns = [layerskip_weights(depth, every, step) for step in range(5, 5 + every)]
    for layer in range(depth - 1):
        assert sorted(turn[layer] for turn in turns)[-1] == sum(range(layer + 1))
        assert sum(turn[layer] > 0 for turn in turns) == (layer > 0)
    assert {turn[-1] for turn in turns} == {depth - 1 + sum(range(depth - 1))}


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_loss_is_the_weighted_mean_of_the_cross_entropies_of_the_exits_whose_turn_it_is(step: int) -> None:
    torch.manual_seed(step)
    hidden = tuple(torch.randn(2, 3, 8) for _ in range(5))
    head = torch.nn.Linear(8, 11)
    labels = torch.tensor([[1, 2, 3], [4, 5, IGNORED]])
    loss = Objective(exits=True, exit_every=3).exits_loss(Exits(hidden, head), labels, num_items=5, step=step)
    each = [functional.cross_entropy(head(h).flatten(0, 1), labels.flatten(), ignore_index=IGNORED) for h in hidden]
    weights = [sum(range(layer + 1)) if (layer - step) % 3 == 0 else 0 for layer in range(4)] + [4 + 0 + 1 + 2 + 3]
    expected = sum(w * one for w, one in zip(weights, each, strict=True)) / sum(weights)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_layer_dropout_lets_rows_bypass_layers_at_their_rates_and_only_in_training() -> None:
    torch.manual_seed(0)
    model = fresh("llama")
    layers = decoder_layers(model)
    add_layer_dropout(model, 0.5)
    ids = torch.randint(3, 50, (512, 4))
    passed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in layers:
        layer.register_forward_hook(
            lambda _, args, kwargs, output: passed.append((args[0] if args else kwargs["hidden_states"], output)),
            with_kwargs=True,
        )
    model.eval()
    plain = model(ids).logits
    assert not any(torch.equal(entered, left) for entered, left in passed)
    passed.clear()
    model.train()
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, plain)
    for rate, (entered, left) in zip(dropout_rates(len(layers), 0.5), passed, strict=True):
        share = (entered == left).flatten(1).float().mean(dim=1)  # [rows]
        assert set((share > 0.01).tolist()) == set((share == 1).tolist()), "a row bypasses a layer as a whole"
        assert (share == 1).float().mean().item() == pytest.approx(rate, abs=0.08)  # 3.5 deviations of 512 rows
