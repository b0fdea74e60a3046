"""The wheel of this machine works where nothing but its own dependencies is installed."""

import re
import subprocess
import venv
from pathlib import Path

import pytest
from built_wheels import ROOT, build_distributions


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_distributions(tmp_path_factory.mktemp("copy"))[1]


def run_with(folder: Path, packages: list[str], script: str) -> str:
    """What a script of tests/support/ prints in a new environment of these packages."""
    venv.create(folder / "bare", with_pip=True)
    python = folder / "bare" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *packages], check=True, cwd=folder)
    # Isolated, so that nothing is imported from the checkout.
    command = [str(python), "-I", str(ROOT / "tests" / "support" / script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_the_wheel_decodes_with_the_compiled_kernels_in_a_bare_environment(wheel: Path, tmp_path: Path) -> None:
    assert re.search(r"-cp3\d+-cp3\d+-linux_", wheel.name)  # it holds compiled code
    printed = run_with(tmp_path, ["torch==2.13.0", "transformers", str(wheel)], "decode_with_kernels.py")
    assert printed.startswith(str(tmp_path / "bare"))


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_the_wheel_trains_with_accelerate_alone_besides(wheel: Path, tmp_path: Path) -> None:
    printed = run_with(tmp_path, ["torch==2.13.0", "transformers", "accelerate", str(wheel)], "train_with_mixin.py")
    assert printed.splitlines()[-1].startswith(str(tmp_path / "bare"))
