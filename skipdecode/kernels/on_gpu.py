"""Whether a device runs the Triton kernels (`skipdecode.kernels.gpu`)."""

import functools
import warnings
from types import ModuleType
from typing import Any

import torch

MAX_ROWS = 32  # rows of a step: for more of them, the time isn't bound by reading the weights any longer
HALF_PRECISION = (
    torch.bfloat16,
    torch.float16,
)  # float32 is used to check results, which torch's products give exactly
_SHARED_MEMORY = 96 * 1024  # bytes that a program with the largest tiles needs


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The module of the kernels; None where Triton isn't installed, which comes with torch's builds for CUDA."""
    try:
        from skipdecode.kernels import gpu as kernels
    except ImportError:
        return None
    return kernels


@functools.cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """The kernels, for an NVIDIA device of compute capability 8.0 or more with enough shared memory; else None.

    Triton compiles a kernel when it is first launched, which needs a C compiler; where that fails, a warning says so.
    """
    kernels = triton_kernels()
    if kernels is None or device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    memory = properties.shared_memory_per_block_optin
    if torch.cuda.get_device_capability(device) < (8, 0) or memory < _SHARED_MEMORY:
        return None
    try:
        with torch.cuda.device(device):
            rows = torch.zeros(MAX_ROWS, 2048, dtype=torch.float16, device=device)
            for count in (1, 16, MAX_ROWS):  # each count runs another kernel, with the largest memory that it uses
                kernels.project(rows[:count], [rows], [None], arrived=kernels.arrivals(device))
            torch.cuda.synchronize()
    except Exception as error:  # of Triton, of the compiler that it calls, of the driver
        warnings.warn(f"decode steps run without the Triton kernels, which fail on this device: {error}", stacklevel=2)
        return None
    return kernels
