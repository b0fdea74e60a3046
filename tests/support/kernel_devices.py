"""Where tests of the Triton kernels run: on a GPU, or in Triton's interpreter (make test-kernels)."""

import importlib.util
import os

import pytest
import torch

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")])
# The interpreter runs with TRITON_INTERPRET=1 in the environment, which must be there when torch is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
IN_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="no interpreter: make test-kernels")
HERE = pytest.param("cpu", marks=IN_INTERPRETER)
