"""Layers that a user compiled train under schedules as they do without."""

from typing import Any

import torch
from tiny_models import randomised, tiny_config
from torch._dynamo.utils import counters

from skipdecode import SkipSchedule
from skipdecode.families import decoder_layers
from skipdecode.training import Objective, PromptCompletionCollator, step_loss

LAYERS = 2
SCHEDULES = [
    SkipSchedule.full_depth(LAYERS),
    SkipSchedule(LAYERS, 1, 1, decay="constant", prompt="max"),
    SkipSchedule(LAYERS, 2, 1, horizon=6),
]


def gradients(model: Any, prompts: int, tokens: int) -> list[torch.Tensor]:
    """Of a batch of two rows, one of them padded."""
    rows = [{"prompt_ids": [5, 6] * n, "completion_ids": [7, 8, 9] * n} for n in (prompts, tokens)]
    model.zero_grad()
    step_loss(model, PromptCompletionCollator(1)(rows), SCHEDULES, Objective(distillation=0.5)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_compiled_layers_have_the_same_gradients_and_are_not_compiled_for_each_length_and_schedule() -> None:
    shape = {"intermediate_size": 48, "num_hidden_layers": LAYERS}
    plain, compiled = (randomised(tiny_config("llama", **shape), seed=0).train() for _ in range(2))
    torch.compiler.reset()
    counters.clear()
    for layer in decoder_layers(compiled):
        layer.compile(backend="eager")  # traces as inductor does, and needs no C++ compiler
    graphs = []
    for lengths in ((1, 2), (3, 2), (2, 4)):
        found, expected = gradients(compiled, *lengths), gradients(plain, *lengths)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert 0 < graphs[1] == graphs[-1] <= 4
    assert not counters["graph_break"]
