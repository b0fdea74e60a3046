"""Values that are kept on a device until they are logged, because to read them the host waits for the device."""

import itertools
from collections.abc import Callable

import torch

MAX_KEPT = 4096  # vectors, a few MiB: where more are kept between two logs, they are read at once


class KeptValues:
    """Vectors on a device, each with a function that receives its values when all are read."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []

    def keep(self, values: torch.Tensor, use: Callable[[list[float]], None]) -> None:
        """Keep a vector; all of them have one dtype."""
        self._kept.append((values, use))
        if len(self._kept) >= MAX_KEPT:
            self.read()

    def read(self) -> None:
        """Call the functions, in the order in which their vectors were kept."""
        kept, self._kept = self._kept, []
        if not kept:
            return
        numbers = iter(torch.cat([values for values, _ in kept]).tolist())  # one transfer from the device
        for values, use in kept:
            use(list(itertools.islice(numbers, len(values))))
