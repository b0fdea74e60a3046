"""The wheel of this machine works where nothing but its own dependencies is installed."""

import re
import subprocess
import venv
from pathlib import Path

import pytest
from built_wheels import ROOT, build_distributions


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_the_wheel_decodes_with_the_compiled_kernels_in_a_bare_environment(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    _, wheel = build_distributions(tmp_path / "copy")
    assert re.search(r"-cp3\d+-cp3\d+-linux_", wheel.name)  # it holds compiled code
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "torch==2.13.0", "transformers", str(wheel)], check=True, cwd=tmp_path)
    script = ROOT / "tests" / "support" / "decode_with_kernels.py"
    # Isolated, so that nothing is imported from the checkout.
    done = subprocess.run([str(python), "-I", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "bare"))
