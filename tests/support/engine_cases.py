"""Requests of an engine, drawn at random, which come, go on and are cancelled while others decode."""

import random
from typing import Any

import torch
from fastpath_cases import fresh
from tiny_models import VOCABULARY

from skipdecode import Engine, SkipSchedule, skip_generate
from skipdecode.engine.sequence import Answer

DEPTH, MOST_NEW = 6, 18
FAMILIES = ["opt", "llama", "gpt2"]  # positions looked up, rotated, and looked up beside transposed weights
# Of several placements and warm-up bands: their sets of layers don't all nest in one another.
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
    """Decode requests that come at random steps, and hold every text against `skip_generate` of its prompt alone.

    Returns how many were cancelled. Raises AssertionError for a text that differs, and for memory that stays held.
    """
    draw = random.Random(seed)
    model: Any = fresh(name).to(dtype)
    held = Engine(model, **{"most_rows": 6, "cache_bytes": 200 * 2 * 32 * dtype.itemsize * DEPTH, **engine})
    asked: list[tuple[list[int], dict[str, Any], Answer]] = []
    most_running = 0
    for number in range(requests):
        prompt, request = _request(draw, number)
        asked.append((prompt, request, held.submit(prompt, **request)))
        for _ in range(draw.randrange(4)):
            held.step()
            most_running = max(most_running, held.state.running)
            if draw.random() < 0.1:
                draw.choice(asked[-6:])[2].cancel()
    assert held.drain()
    state = held.state
    assert most_running > 2, "texts decoded one after another: nothing was tried"
    assert (state.running, state.waiting, state.free_columns) == (0, 0, state.columns)
    assert held.gaps == 1, "what was given back is in pieces"
    cancelled = 0
    for prompt, request, answer in asked:
        found, expected = answer.result(0), alone(model, prompt, request)
        assert list(found.tokens) == expected[: len(found.tokens)], (prompt, request)
        if found.end == "cancelled":
            cancelled += 1
        else:
            assert len(found.tokens) == len(expected), (prompt, request)
    return cancelled


def _request(draw: random.Random, number: int) -> tuple[list[int], dict[str, Any]]:
    prompt = [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(1, 14))]
    request: dict[str, Any] = {"schedule": draw.choice(SCHEDULES), "max_new_tokens": draw.randint(1, MOST_NEW)}
    request["eos_token_id"] = draw.sample(range(2, VOCABULARY), draw.randint(1, 4))
    request["do_sample"] = draw.random() < 0.3
    if request["do_sample"]:
        request |= {"seed": number, "temperature": draw.choice([0.7, 1.5]), "top_k": draw.choice([0, 5, 20])}
    if draw.random() < 0.2:
        request["repetition_penalty"] = 1.3
    request["lossless"] = draw.random() < 0.3
    return prompt, request


def alone(model: Any, prompt: list[int], request: dict[str, Any]) -> list[int]:
    """The new tokens of `skip_generate` for a prompt alone."""
    settings = dict(request)
    if settings.pop("lossless", False):
        settings["schedule"] = SCHEDULES[0]
    torch.manual_seed(settings.pop("seed", 0))
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, custom_generate=skip_generate, **settings)
    found: list[int] = text[0, len(prompt) :].tolist()
    return found
