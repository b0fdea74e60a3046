"""Confidence exits equal a naive loop over the layers of transformers, for single sequences and batches."""

from typing import Any

import pytest
import torch
from fastpath_cases import tiny
from tiny_models import END, PAD, ragged_prompts, tiny_opt

from eval.systems.calm import calm_generate, margins
from skipdecode import ConfigError, PlannedCache
from skipdecode.families import decoder_layers
from skipdecode.generate.fast_path import fast_path

LAYERS, NEW = 6, 10
NORMS = {
    "opt": "model.decoder.final_layer_norm",
    "opt-350m": "model.decoder.project_out",
    "llama": "model.norm",
    "qwen3": "model.norm",
    "mistral": "model.norm",
    "phi": "model.final_layernorm",
    "gpt2": "transformer.ln_f",
    "bloom": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
}


def calm(model: Any, ids: torch.Tensor, mask: torch.Tensor, threshold: float, **changes: Any) -> tuple[Any, list[Any]]:
    exits: list[list[int]] = []
    request = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **changes}
    request |= {"custom_generate": calm_generate, "threshold": threshold, "exits": exits}
    output = model.generate(ids, attention_mask=mask, **request)
    return output[:, ids.shape[1] :], exits


def naive(name: str, prompt: list[int], threshold: float) -> tuple[list[int], list[int]]:
    """Decode one sequence with the forward pass of transformers, recomputing every token for each new one.

    What went into each layer is kept for every position; a token that left at a layer goes into all layers above as it
    was then. Hooks put that in place of what would flow there, so that layers make their own keys and values of it.
    """
    model = tiny(name)
    layers = decoder_layers(model)
    norm, head = model.get_submodule(NORMS[name]), model.get_output_embeddings()
    kept: list[Any] = [None] * LAYERS  # input of layer l at previous positions, [1, positions so far, hidden]
    came: list[Any] = [None] * LAYERS  # input of layer l at the new positions

    def into(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if kept[index] is not None:
                hidden = torch.cat([kept[index], hidden[:, kept[index].shape[1] :]], dim=1)
            came[index] = hidden
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return hook

    def out_of_last(module: Any, args: Any, output: Any) -> None:
        came.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_pre_hook(into(n), with_kwargs=True) for n, layer in enumerate(layers)]
    handles.append(layers[-1].register_forward_hook(out_of_last))
    tokens, exits = list(prompt), []
    try:
        with torch.no_grad():
            for step in range(NEW):
                del came[LAYERS:]
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
                if step > 0:
                    states = [state[:, -1:] for state in came[1:]]  # after each layer, [1, 1, hidden]
                    for depth, state in enumerate(states, start=1):
                        logits = head(norm(state))[0, 0]
                        first, second = logits.softmax(dim=-1).sort(descending=True).values[:2]
                        if first - second >= threshold or depth == LAYERS:
                            break
                    exits.append(depth)
                    for index in range(depth, LAYERS):
                        came[index] = torch.cat([came[index][:, :-1], state], dim=1)
                kept[:] = came[:LAYERS]
                tokens.append(int(logits.argmax()))
    finally:
        for handle in handles:
            handle.remove()
    return tokens[len(prompt) :], exits


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("threshold", [0.05, 0.1])
def test_confidence_exits_equal_a_naive_loop(name: str, threshold: float) -> None:
    threshold += 0.3 if name == "bloom" else 0  # with random weights it is more confident than the others
    ids, mask = ragged_prompts([9], 3)
    tokens, exits = naive(name, ids[0].tolist(), threshold)
    for weights in ("model", "packed"):
        ours, our_exits = calm(tiny(name), ids, mask, threshold, weights=weights)
        assert [row[0] for row in our_exits] == exits
        assert ours[0].tolist() == tokens
    assert len(set(exits)) > 1, "a threshold at which nothing is decided proves nothing"


@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("end", [None, END], ids=["no row ends", "rows end"])
def test_confidence_exits_in_a_batch_equal_those_of_single_sequences(
    name: str, threshold: float, end: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    keep_rows = PlannedCache.keep_rows
    monkeypatch.setattr(PlannedCache, "keep_rows", lambda self, rows: (held.append(len(rows)), keep_rows(self, rows)))
    lengths = [3, 12, 5, 7]
    ids, mask = ragged_prompts(lengths, 5)
    if end is not None:  # a token that the sequences generate at different steps
        end = int(calm(tiny(name), ids, mask, threshold)[0][1, 3])
    together, exits = calm(tiny(name), ids, mask, threshold, eos_token_id=end)
    assert bool(held) == (end is not None), "rows that have ended leave the batch"
    for row, length in enumerate(lengths):
        prompt, seen = ids[row : row + 1, -length:], mask[row : row + 1, -length:]
        alone, alone_exits = calm(tiny(name), prompt, seen, threshold, eos_token_id=end)
        steps = len(alone_exits)
        assert together[row, : steps + 1].tolist() == alone[0].tolist()
        assert [step[row] for step in exits[:steps]] == [step[0] for step in alone_exits]
        assert [step[row] for step in exits[steps:]] == [0] * (len(exits) - steps)  # an ended sequence runs no layers


def test_generating_one_token_takes_no_decode_step() -> None:
    ids, mask = ragged_prompts([4, 9], 6)
    tokens, exits = calm(tiny("opt"), ids, mask, 0.5, max_new_tokens=1)
    assert tokens.shape == (2, 1)
    assert exits == []


def test_the_confidence_margin_is_between_0_and_1_even_for_large_logits() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 0.0], [3.0, 3.0, 3.0], [0.0, 1.0, 2.0]])
    chances = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    assert margins(logits) == pytest.approx([1.0, 0.0, float(chances[2] - chances[1])])


def test_a_model_without_a_fast_path_is_refused() -> None:
    model = tiny_opt.__wrapped__("opt", 2)
    model.register_forward_hook(lambda *_: None)
    ids, mask = ragged_prompts([4], 6)
    with pytest.raises(ConfigError, match="CALM can't decode with this model: the model has hooks"):
        calm(model, ids, mask, 0.5)


def test_the_weight_copies_of_state_propagation_are_created_once() -> None:
    from eval.systems import calm as module

    ids, mask = ragged_prompts([4], 6)
    model = tiny("opt")
    calm(model, ids, mask, 0.5, weights="packed")
    made = module._KEY_VALUES[fast_path(model).decoder("packed")]
    calm(model, ids, mask, 0.9, weights="packed")
    assert module._KEY_VALUES[fast_path(model).decoder("packed")] is made
