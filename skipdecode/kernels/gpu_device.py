"""What launches of the Triton kernels need to know of a device; the defaults of a CPU serve Triton's interpreter."""

from typing import Any

import torch


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device, of: str) -> int:
    """Bytes of shared memory of a "multiprocessor", or the maximum of a program ("block_optin")."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, f"shared_memory_per_{of}") if properties else 0


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def dependent_launch(tensor: torch.Tensor) -> dict[str, Any]:
    """Options with which a kernel starts while the one before it runs, where the device supports that."""
    return {"DEPENDENT": True, "launch_pdl": True} if capability(tensor.device) >= (9, 0) else {"DEPENDENT": False}
