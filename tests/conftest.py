"""Where tests run, which is neither the checkout nor the user's home, and the folder of real data."""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("skipdecode", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("skipdecode")

ROOT = Path(__file__).resolve().parent.parent
# What is no part of the checkout: results of a user's runs, and what tools keep of theirs.
KEPT = {"outputs", "build", "dist", "wandb", ".git", ".venv", "skipdecode.egg-info"}
CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}

# A user's settings, keys and caches reach a library by these and by the home folder. All of them are read when it is
# imported, so this comes first; processes that tests start inherit it.
for name in list(os.environ):
    if name.startswith(("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "WANDB_", "XDG_", "MPL", "TORCH_HOME", "NLTK_DATA")):
        del os.environ[name]
_HOME = tempfile.TemporaryDirectory(prefix="skipdecode-home-")
os.environ["HOME"] = _HOME.name
# So that `python -m eval` is found from every folder.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that train come first: they take longest, and two processes end together where short files are left."""
    items.sort(key=lambda item: "training" not in item.path.parts)


def _contents(folder: Path) -> dict[str, int]:
    """Each file below a folder and when it was last written, but for caches, .venv and .git."""
    found = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if each not in CACHES | {".git", ".venv"}]
        for path in (Path(parent, file) for file in [*files, *folders]):
            found[str(path.relative_to(folder))] = 0 if path.is_dir() else path.lstat().st_mtime_ns
    return found


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_written_outside_of_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests run in a folder of links to what a fresh clone holds: outputs/ is neither found nor filled by any."""
    clone, temporary = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("temporary")
    for path in ROOT.iterdir():
        if path.name not in KEPT | CACHES:
            (clone / path.name).symlink_to(path)
    folders = {ROOT: _contents(ROOT), clone: _contents(clone)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.chdir(clone)
        yield
    written = [
        folder / name for folder, old in folders.items() for name in dict(old.items() ^ _contents(folder).items())
    ]
    if written and os.environ.get("CI"):
        pytest.fail(f"the tests wrote {written}")
    elif written:
        warnings.warn(f"the tests, or somebody beside them, wrote {written}", stacklevel=1)


@pytest.fixture(autouse=True)
def _shared_models_stay_unchanged() -> Iterator[None]:
    """What a test does to a model that others share, it must undo."""
    yield
    if models := sys.modules.get("tiny_models"):
        changed = models.changed_models()
        assert not changed, f"the test left shared models changed: {changed}; use fresh()"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; without it the test is skipped."""
    folder = os.environ.get("SKIPDECODE_DATA")
    if not folder:
        pytest.skip("SKIPDECODE_DATA names no folder of real data")
    path = Path(folder)
    assert path.is_dir(), f"SKIPDECODE_DATA is {folder!r}: no such folder"
    return path
