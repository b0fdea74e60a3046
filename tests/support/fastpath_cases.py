"""Models, schedules and a call for tests that compare the fast path with a model's own forward pass."""

from typing import Any

from tiny_models import OPT_KINDS, TINY_FAMILIES, ragged_prompts, tiny_family, tiny_opt
from transformers import PreTrainedModel

from skipdecode import SkipSchedule, skip_generate

SCHEDULES = [SkipSchedule(6, 4, 2, horizon=5), SkipSchedule.full_depth(6), SkipSchedule(6, 5, 3, placement="even")]
MODELS = [*sorted(TINY_FAMILIES), "opt", "opt-350m"]
WINDOWED = {"mistral"}  # those with a sliding window, which have no CUDA graphs


def tiny(name: str) -> PreTrainedModel:
    """A model that tests share."""
    return tiny_opt(name, 6) if name in OPT_KINDS else tiny_family(name)


def fresh(name: str) -> PreTrainedModel:
    """A model that no other test has changed."""
    return tiny_opt.__wrapped__(name, 6) if name in OPT_KINDS else tiny_family.__wrapped__(name)


def generate(model: Any, lengths: list[int], schedule: SkipSchedule, **changes: Any) -> Any:
    ids, mask = (tensor.to(model.device) for tensor in ragged_prompts(lengths, 4))
    request = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, **changes}
    return model.generate(
        input_ids=ids, attention_mask=mask, custom_generate=skip_generate, schedule=schedule, **request
    )
