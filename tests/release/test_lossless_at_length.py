"""Lossless decoding held against full depth in more draws than the suite has time for.

OMP_NUM_THREADS=1 python -m pytest -n 2 tests/release/test_lossless_at_length.py
"""

import pytest
from decoding_cases import Case
from fastpath_cases import MODELS, SCHEDULES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lossless_cases import DRAFTS, check_lossless, greedy_cases
from lossless_sampling import chi_square, sampled_counts

from skipdecode import SkipSchedule


@pytest.mark.parametrize("part", range(10))
@settings(max_examples=500, database=None, suppress_health_check=list(HealthCheck))
@given(greedy_cases(), st.sampled_from(DRAFTS), st.booleans())
def test_thousands_of_drafts_are_corrected_to_full_depths_text(
    part: int, case: Case, drafts: int | str, double: bool
) -> None:
    check_lossless(case, drafts, double=double)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["skipping", "full depth", "even placement"])
@pytest.mark.parametrize("name", MODELS)
def test_20000_sampled_tokens_have_full_depths_distribution(name: str, schedule: SkipSchedule) -> None:
    assert chi_square(*sampled_counts(name, schedule, rows=500, calls=10)) > 1e-4
