"""Tiny random models and the data folder, for every test."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("skipdecode", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("skipdecode")

# Rows that tests tokenise stay out of the user's cache. Set before datasets is imported, which reads it then.
_CACHE = tempfile.TemporaryDirectory(prefix="skipdecode-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; without it the test is skipped."""
    folder = os.environ.get("SKIPDECODE_DATA")
    if not folder:
        pytest.skip("SKIPDECODE_DATA names no folder of real data")
    path = Path(folder)
    assert path.is_dir(), f"SKIPDECODE_DATA is {folder!r}: no such folder"
    return path
