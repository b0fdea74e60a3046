"""Decoding through generate: sampling, stopping, streaming, and what is refused."""

from typing import Any

import pytest
import torch
from tiny_models import ragged_prompts, tiny_opt
from transformers.generation.streamers import BaseStreamer

from skipdecode import ConfigError, SkipSchedule, skip_generate
from skipdecode.families import decoder_layers

SCHEDULE = SkipSchedule(6, 5, 2, horizon=6)


def generate(schedule: SkipSchedule | None = SCHEDULE, lengths: tuple[int, ...] = (3, 7, 5), **changes: Any) -> Any:
    model = tiny_opt("opt", 6)
    ids, mask = ragged_prompts(list(lengths), 3)
    request = {"max_new_tokens": 12, "do_sample": False, "schedule": schedule, **changes}
    return model.generate(input_ids=ids, attention_mask=mask, custom_generate=skip_generate, **request)


def test_each_step_runs_the_layers_of_its_budget_alone() -> None:
    model = tiny_opt("opt", 6)
    ran: list[list[int]] = []
    hooks = []
    for index, layer in enumerate(decoder_layers(model)):

        def note(module: Any, args: Any, index: int = index) -> None:
            if index == 0:
                ran.append([])
            ran[-1].append(index)

        # Hooked on the attention, which a skipped layer never reaches.
        hooks.append(layer.self_attn.q_proj.register_forward_pre_hook(note))
    try:
        generate(eos_token_id=None, max_new_tokens=10)
    finally:
        for hook in hooks:
            hook.remove()
    assert ran[0] == [0, 1, 2, 3, 4, 5]  # prefill
    assert [tuple(layers) for layers in ran[1:]] == [SCHEDULE.layers_at(i) for i in range(9)]


def test_a_streamer_gets_every_token_in_order() -> None:
    class Collector(BaseStreamer):
        def __init__(self) -> None:
            self.pieces: list[torch.Tensor] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.pieces.append(value)

        def end(self) -> None:
            self.ended = True

    streamer = Collector()
    output = generate(streamer=streamer)
    assert streamer.ended
    assert torch.equal(streamer.pieces[0], output[:, :7])  # generate itself puts the prompt
    assert torch.equal(torch.stack(streamer.pieces[1:], dim=1), output[:, 7:])


def test_a_prompt_may_have_several_sampled_sequences() -> None:
    torch.manual_seed(0)
    assert generate(do_sample=True, num_return_sequences=2, lengths=(4,)).shape[0] == 2


def test_the_result_contains_scores_and_cache_if_requested() -> None:
    output = generate(return_dict_in_generate=True, output_scores=True, eos_token_id=None)
    assert len(output.scores) == 12
    assert torch.equal(output.sequences, generate(eos_token_id=None))
    # Law 6: layer l holds the prompt and c(l) new tokens, or nothing; the last new token is never an input.
    held = [output.past_key_values.get_seq_length(layer) for layer in range(6)]
    assert held == [7 + count if count else 0 for count in SCHEDULE.cutoffs(11)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": None}, "schedule is missing"),
        ({"schedule": SkipSchedule(24, 8, 4)}, "the schedule is for 24 layers, the model has 6"),
        ({"num_beams": 2}, "num_beams is 2"),
        ({"use_cache": False}, "use_cache is False"),
        ({"max_new_tokens": 300}, "positions are needed and the model has 96"),
        ({"lengths": (97,), "max_new_tokens": 1}, "the longest prompt has 97 tokens"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(**change)


def test_all_positions_of_the_model_can_be_used() -> None:
    assert generate(lengths=(90,), max_new_tokens=7, eos_token_id=None).shape[1] == 97  # 96 positions are inputs


def test_a_model_whose_layers_cache_more_than_keys_and_values_keeps_its_own_cache() -> None:
    model = tiny_opt.__wrapped__("opt", 6)
    model.config.layer_types = ["full_attention"] * 5 + ["linear_attention"]
    ids, mask = ragged_prompts([4, 4], 1)
    request: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    request |= {"custom_generate": skip_generate, "schedule": SCHEDULE}
    with pytest.raises(ConfigError, match="its layers are of the kinds full_attention, linear_attention"):
        model.generate(input_ids=ids, attention_mask=mask, weights="int8", **request)
