"""The machine of a measurement, and package versions."""

import os
import platform
import statistics
import time
from importlib import metadata
from typing import Any

import torch

from skipdecode.kernels.cpu import kernels
from skipdecode.schedule.machine_profile import processor

PACKAGES = (
    *("skipdecode", "torch", "transformers", "tokenizers"),
    *("sacrebleu", "rouge-score", "nltk", "bert-score", "ctranslate2", "llama-cpp-python", "gguf"),
)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads and memory of the machine, and the compiled kernels used on a CPU."""
    compiled = kernels() if device.type == "cpu" else None
    return {
        "processor": processor(device),
        "kernels": None if compiled is None else compiled.name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
    }


def machine_identity(device: torch.device) -> dict[str, Any]:
    """The properties that times depend on, which must be equal when a benchmark continues."""
    machine = describe_machine(device)
    return {name: machine[name] for name in ("processor", "kernels", "cores", "threads")}


def copy_bytes_per_second(device: torch.device, size: int = 2**28) -> float:
    """Bytes read and written per second by a copy of `size` bytes: the memory bandwidth available to a decode step."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds = []
    copies = (
        16 if device.type == "cuda" else 1
    )  # amortizes launch and synchronization, which cost 10 % of a single copy
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size * copies / statistics.median(seconds)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
