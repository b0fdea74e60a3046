"""Ways in which the weights of a model change between two generations."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel


def _chosen(model: nn.Module, only: int | None) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    return parameters if only is None else [parameters[only % len(parameters)]]


def _noise(parameter: torch.Tensor) -> torch.Tensor:
    return torch.randn(parameter.shape) * 0.1


@torch.no_grad()
def in_place(model: PreTrainedModel, only: int | None) -> None:
    for parameter in _chosen(model, only):
        parameter.add_(_noise(parameter))


def data_add(model: PreTrainedModel, only: int | None) -> None:
    for parameter in _chosen(model, only):
        parameter.data.add_(_noise(parameter))


def data_copy(model: PreTrainedModel, only: int | None) -> None:
    for parameter in _chosen(model, only):
        parameter.data.copy_(parameter.detach() + _noise(parameter))


def data_assigned(model: PreTrainedModel, only: int | None) -> None:
    for parameter in _chosen(model, only):
        parameter.data = parameter.detach() + _noise(parameter)


def averaged(model: PreTrainedModel, only: int | None) -> None:
    """An exponential moving average is put in place, as `copy_to` of the usual libraries does."""
    chosen = _chosen(model, only)
    shadows = [parameter.detach().clone() for parameter in chosen]
    for shadow, parameter in zip(shadows, chosen, strict=True):
        shadow.lerp_(parameter.detach() + 2 * _noise(parameter), 0.5)
    for shadow, parameter in zip(shadows, chosen, strict=True):
        parameter.data.copy_(shadow.data)


def _fused(optimiser: Callable[..., Any]) -> Callable[[PreTrainedModel, int | None], None]:
    def step(model: PreTrainedModel, only: int | None) -> None:
        chosen = [parameter.requires_grad_() for parameter in _chosen(model, only)]
        for parameter in chosen:
            parameter.grad = torch.randn(parameter.shape)
        optimiser(chosen, lr=0.1, fused=True).step()
        for parameter in chosen:
            parameter.grad = None

    return step


def state_dict_loaded(model: PreTrainedModel, only: int | None) -> None:
    changed = {id(parameter) for parameter in _chosen(model, only)}
    named = dict(model.named_parameters())  # tied weights once
    weights = {name: p.detach() + _noise(p) for name, p in named.items() if id(p) in changed}
    model.load_state_dict(weights, strict=False)


def replaced(model: PreTrainedModel, only: int | None) -> None:
    changed = {id(parameter) for parameter in _chosen(model, only)}
    others: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in changed and id(parameter) not in others:
                others[id(parameter)] = nn.Parameter(parameter.detach() + _noise(parameter))
            if id(parameter) in others:
                setattr(module, name, others[id(parameter)])


def to_inference_mode(model: PreTrainedModel) -> None:
    """Parameters that count no versions."""
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


def in_inference_mode(model: PreTrainedModel, only: int | None) -> None:
    with torch.inference_mode():
        for parameter in _chosen(model, only):
            parameter.add_(_noise(parameter))


def adapters_merged(model: PreTrainedModel, only: int | None) -> None:
    """LoRA is trained for two steps and merged into the model itself, in all linear layers or those of one name."""
    names = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_projection(name, module)})
    targets = names if only is None else [names[only % len(names)]]
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, lora_alpha=4))
    optimiser = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=0.1)
    ids = torch.randint(4, 61, (2, 8))
    for _ in range(2):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    assert adapted.merge_and_unload() is model


def _is_projection(name: str, module: nn.Module) -> bool:
    head = name.rpartition(".")[2] in ("lm_head", "embed_out")  # its weight may be the embedding's too
    return type(module).__name__ in ("Linear", "Conv1D") and not head


def _nothing(model: PreTrainedModel) -> None:
    pass


# name -> (what comes before the first generation, what comes between it and the second)
UPDATES: dict[str, tuple[Callable[[PreTrainedModel], None], Callable[[PreTrainedModel, int | None], None]]] = {
    "in place": (_nothing, in_place),
    "p.data.add_": (_nothing, data_add),
    "p.data.copy_": (_nothing, data_copy),
    "p.data =": (_nothing, data_assigned),
    "EMA": (_nothing, averaged),
    "fused AdamW": (_nothing, _fused(torch.optim.AdamW)),
    "fused SGD": (_nothing, _fused(torch.optim.SGD)),
    "fused Adagrad": (_nothing, _fused(torch.optim.Adagrad)),
    "load_state_dict": (_nothing, state_dict_loaded),
    "replaced": (_nothing, replaced),
    "inference mode": (to_inference_mode, in_inference_mode),
    "LoRA merged": (_nothing, adapters_merged),
}
