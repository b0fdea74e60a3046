"""Capturing of CUDA graphs, which replay kernels on the same memory."""

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Replay: TypeAlias = Callable[[], None]

_CAPTURING = threading.Lock()  # a process captures one graph at a time


class GraphRecorder:
    """Captures graphs that share a memory pool, which never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # torch's own stream for captures is of the first device that captured

    def record(self, forward: Replay, device: torch.device, before: Replay | None = None) -> Replay:
        """A function that does what `forward` does on the current device; without a GPU it is `forward` itself.

        Args:
            forward: launches kernels on fixed memory, and never waits for the device. It is run here, but what it
                computes is written only by the result.
            before: called before each run of `forward`, to set what it reads.
        """
        if device.type != "cuda":
            return forward
        before = before or _nothing
        with _CAPTURING:
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            # In the first runs kernels are loaded and libraries choose algorithms, which a capture can't record.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    before()
                    forward()
                before()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread's operations, such as allocating memory, don't end the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                forward()
        return graph.replay


def _nothing() -> None:
    pass
