"""Law 5 where no test was written: thousands of cases, others in each run, held against the same reference.

    OMP_NUM_THREADS=1 python -m pytest -n 2 tests/release/test_random_decoding_at_length.py     # or -k threads

A case that fails is made as small as it can be, and printed as a call of `Case`.
"""

import random

import pytest
from decoding_cases import MODELS, Case, cases, run_case
from decoding_threads import FAST, SLOW, decode_side_by_side
from hypothesis import HealthCheck, given, settings

from skipdecode import SkipSchedule


@pytest.mark.parametrize("part", range(40))  # what hypothesis remembers of one part stays small
@settings(max_examples=500, database=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_hundreds_of_cases_decode_what_the_reference_chooses(part: int, case: Case) -> None:
    run_case(case)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedules", [[FAST, SLOW], [FAST, SLOW, None]], ids=["two", "three"])
def test_hundreds_of_calls_in_threads_get_their_own_texts(name: str, schedules: list[SkipSchedule | None]) -> None:
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    decode_side_by_side(name, 300, seed, schedules)
