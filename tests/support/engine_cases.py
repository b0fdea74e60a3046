"""Random requests to an engine: they are submitted, decoded and cancelled while others decode."""

import random
from typing import Any

import torch
from fastpath_cases import fresh
from tiny_models import VOCABULARY

from skipdecode import Engine, SkipSchedule, skip_generate
from skipdecode.engine.sequence import Answer

DEPTH, MAX_NEW_TOKENS = 6, 18
FAMILIES = ["opt", "llama", "gpt2"]  # learned positions, rotary positions, and transposed weights
# Different placements and warm-up layers: their sets of layers aren't all nested in one another.
SCHEDULES = [
    SkipSchedule.full_depth(DEPTH),
    SkipSchedule(DEPTH, 4, 2, horizon=5),
    SkipSchedule(DEPTH, 3, 1, horizon=9, prompt="max"),
    SkipSchedule(DEPTH, 5, 2, warmup_layers=2, horizon=7, prompt_stop=3),
    SkipSchedule(DEPTH, 5, 3, placement="even"),
    SkipSchedule(DEPTH, 4, 1, placement="bottom", decay="constant", horizon=4),
    SkipSchedule(DEPTH, 4, 2, placement="order", order=(0, 5, 2, 4, 1, 3), horizon=6),
    SkipSchedule(DEPTH, 5, 3, placement="order", order=(0, 3, 4, 1, 5, 2), prompt="max", horizon=6),
]


def play(name: str, dtype: torch.dtype, requests: int, seed: int, **engine: Any) -> int:
    """Submit requests at random steps, and compare every sequence with that of `skip_generate` for its prompt alone.

    Args:
        name: of the model's family.
        dtype: of the model.
        requests: how many to submit.
        seed: of the random choices.
        engine: arguments of Engine.

    Returns:
        How many requests were cancelled.

    Raises:
        AssertionError: if a sequence differs, or if memory isn't freed.
    """
    draw = random.Random(seed)
    model: Any = fresh(name).to(dtype)
    layer_bytes = 2 * 32 * dtype.itemsize  # of one token
    sizes = {"most_rows": 6, "wave_tokens": 20, "cache_bytes": 300 * layer_bytes * DEPTH}
    # The prefix cache holds a part of what these prompts could use.
    tested = Engine(model, **{**sizes, "prefix_mib": 20 * 16 * layer_bytes * DEPTH / 2**20, **engine})
    submitted: list[tuple[list[int], dict[str, Any], Answer]] = []
    max_running = 0
    for number in range(requests):
        prompt, request = _request(draw, number)
        submitted.append((prompt, request, tested.submit(prompt, **request)))
        for _ in range(draw.randrange(4)):
            tested.step()
            max_running = max(max_running, tested.state.running)
            if draw.random() < 0.1:
                draw.choice(submitted[-6:])[2].cancel()
    assert tested.drain()
    state = tested.state
    assert max_running > 2, "sequences decoded one after another, so batching wasn't tested"
    assert (state.running, state.waiting, state.free_slots) == (0, 0, state.slots)
    assert state.free_regions == 1, "freed slots weren't merged into one region"
    assert state.prefix_bytes <= 20 * 16 * layer_bytes * DEPTH
    assert state.prefix_tokens > 0, "no prompt began like an earlier one, so the prefix cache wasn't tested"
    cancelled = 0
    for prompt, request, answer in submitted:
        found, expected = answer.result(0), alone(model, prompt, request)
        assert list(found.tokens) == expected[: len(found.tokens)], (prompt, request)
        if found.end == "cancelled":
            cancelled += 1
        else:
            assert len(found.tokens) == len(expected), (prompt, request)
    tested.close()
    assert tested.state.prefix_bytes == 0
    return cancelled


def _request(draw: random.Random, number: int) -> tuple[list[int], dict[str, Any]]:
    prompt = [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 14))]
    if draw.random() < 0.5:  # a part of one of three texts comes first
        chat = random.Random(draw.randrange(3))
        prompt = [chat.randrange(4, VOCABULARY) for _ in range(60)][: draw.randint(1, 60)] + prompt
    request: dict[str, Any] = {"schedule": draw.choice(SCHEDULES), "max_new_tokens": draw.randint(1, MAX_NEW_TOKENS)}
    request["eos_token_id"] = draw.sample(range(2, VOCABULARY), draw.randint(1, 4))
    request["do_sample"] = draw.random() < 0.3
    if request["do_sample"]:
        request |= {"seed": number, "temperature": draw.choice([0.7, 1.5]), "top_k": draw.choice([0, 5, 20])}
    if draw.random() < 0.2:
        request["repetition_penalty"] = 1.3
    request["lossless"] = draw.random() < 0.3
    return prompt, request


def alone(model: Any, prompt: list[int], request: dict[str, Any]) -> list[int]:
    """The new tokens that `skip_generate` gives for this prompt alone."""
    settings = dict(request)
    if settings.pop("lossless", False):
        settings["schedule"] = SCHEDULES[0]
    torch.manual_seed(settings.pop("seed", 0))
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    generated = model.generate(ids, attention_mask=mask, custom_generate=skip_generate, **settings)
    new_tokens: list[int] = generated[0, len(prompt) :].tolist()
    return new_tokens
