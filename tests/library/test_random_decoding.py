"""Law 5 for random families, schedules, batches, padding, caches, weights, sampling, and weight updates between."""

from dataclasses import replace

import pytest
import torch
import transformers
from decoding_cases import LAYERS, Case, cases, check, decode, draw_prompts, fresh_model, run_case, whole_pass
from decoding_threads import FAST, SLOW, decode_side_by_side
from hypothesis import event, given, seed, settings
from naive_opt import naive_logits
from packaging import version
from tiny_models import END, OPT_KINDS, ragged_prompts

from skipdecode import SkipSchedule

CASE = Case("opt", FAST, (5, 3), 0, 12, (END,), True, False, "planned", None, None, None, None)


# 400 cases, the same in each run: 100 with a new transformers, the others with an old one (make test-oldest).
# tests/release draws new ones each time.
OLD = version.parse(transformers.__version__) < version.parse("5.18")


@seed(18 if OLD else 23)
@settings(max_examples=300 if OLD else 100, database=None)
@given(cases())
def test_every_case_decodes_the_tokens_of_the_reference(case: Case) -> None:
    event(f"near ties: {run_case(case)}")


@pytest.mark.parametrize("kind", sorted(OPT_KINDS))
@pytest.mark.parametrize("prompt", ["full", "max"])
def test_the_reference_equals_the_model_with_masked_layers(kind: str, prompt: str) -> None:
    schedule = SkipSchedule(LAYERS, 4, 2, horizon=5, prompt=prompt)  # type: ignore[arg-type]
    ids, mask = ragged_prompts([14], 3)
    with torch.no_grad():
        masked = naive_logits(fresh_model(kind), ids, mask, 5, schedule)
    passed = whole_pass(fresh_model(kind), ids[0].tolist(), schedule, 5)
    torch.testing.assert_close(passed, masked[0], atol=2e-4, rtol=0)


def test_the_check_rejects_the_output_of_another_schedule_or_of_other_weights() -> None:
    prompts = draw_prompts(CASE)
    texts = decode(CASE, fresh_model("opt"), prompts)
    check(CASE, fresh_model("opt"), prompts, texts)
    with pytest.raises(AssertionError, match="below the best"):
        check(replace(CASE, schedule=SLOW), fresh_model("opt"), prompts, texts)
    with pytest.raises(AssertionError, match="below the best"):
        check(CASE, fresh_model("opt-350m"), prompts, texts)


@pytest.mark.parametrize("name", ["opt", "qwen3, slides first"])
def test_threads_that_decode_with_one_model_get_independent_outputs(name: str) -> None:
    decode_side_by_side(name, 60, 0, [FAST, SLOW, None])
