"""The device that a command decodes on."""

import torch

from skipdecode.errors import ConfigError


def resolve_device(name: str | None) -> torch.device:
    """The device that --device names, by default CUDA if available. Raises ConfigError if it can't be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()  # fails on "meta", a device without memory
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--device is {name!r}, which can't be used: {reason}") from error
    return device
