"""Several threads that decode with one model at different speeds, and a plain `generate` beside them."""

import random
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from decoding_cases import (
    LAYERS,
    MOST_NEW_TOKENS,
    ROUNDED,
    WITHOUT_GRAPHS,
    Case,
    check,
    check_rounded,
    decode,
    draw_prompts,
    fresh_model,
)
from tiny_models import END, VOCABULARY

from skipdecode import SkipSchedule

# What each thread decodes with, call by call: fast, slow, and full depth without a schedule.
FAST, SLOW = SkipSchedule(LAYERS, 3, 1, horizon=6), SkipSchedule(LAYERS, 6, 4, horizon=8)
PLAIN = SkipSchedule.full_depth(LAYERS)


def decode_side_by_side(model_name: str, calls: int, seed: int, schedules: list[SkipSchedule | None]) -> int:
    """Make `calls` calls in as many threads as there are schedules; None stands for plain `generate`.

    Returns how many tokens were chosen otherwise in a near tie. Raises AssertionError where a text is wrong, where a
    call fails, and where the model isn't afterwards what it was.
    """
    model, reference = deepcopy(fresh_model(model_name)), fresh_model(model_name)
    told: list[str] = []
    found: list[tuple[Case, list[list[int]]]] = []

    def work(number: int, schedule: SkipSchedule | None) -> None:
        draw = random.Random(f"{seed} {number}")
        for _ in range(calls // len(schedules)):
            try:
                case = _draw(draw, model_name, schedule)
                found.append((case, decode(case, model, draw_prompts(case), plain=schedule is None)))
            except Exception:
                told.append(traceback.format_exc())
                return

    threads = [threading.Thread(target=work, args=each) for each in enumerate(schedules)]
    with _switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not told, told[0]
    ties = 0
    for case, texts in found:
        if case.weights in ROUNDED:
            ties += check_rounded(case, reference, reference, draw_prompts(case), texts)
        else:
            ties += check(case, reference, draw_prompts(case), texts)
    assert [type(module) for module in model.modules()] == [type(module) for module in reference.modules()]
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits), "a layer is still gated"
    return ties


def _draw(draw: random.Random, model_name: str, schedule: SkipSchedule | None) -> Case:
    """Greedy: the generator of samples is one for all threads."""
    cache = draw.choice(["planned", "planned", "dynamic"])
    return Case(
        model=model_name,
        schedule=schedule or PLAIN,
        lengths=tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 5))),
        seed=draw.randrange(1000),
        new_tokens=draw.randint(1, MOST_NEW_TOKENS),
        ends=(END, *draw.sample(range(4, VOCABULARY), draw.randint(0, 8))),
        mask=True,
        embeds=draw.random() < 0.2,
        cache=cache,
        weights=draw.choice([None, None, *ROUNDED]) if cache == "planned" and schedule is not None else None,
        sampling=None,
        update=None,
        only=None,
        cuda_graphs=draw.random() < 0.2 and cache == "planned" and model_name not in WITHOUT_GRAPHS,
    )


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
