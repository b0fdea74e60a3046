"""Profile a decode step by operation."""

from collections.abc import Sequence

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from eval.speed.peers import TimedDecoder
from eval.tables import Table


def print_profiles(decoders: Sequence[TimedDecoder], ids: torch.Tensor, new_tokens: int, console: Console) -> None:
    """Print the time of each operation in a decode step: that of a full run minus that of its prefill."""
    on_cuda = ids.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    for decoder in decoders:
        decoder.run(ids, new_tokens)
        with profile(activities=activities) as prefill:
            decoder.run(ids, 1)
        with profile(activities=activities) as full_run:
            decoder.run(ids, new_tokens)
        console.print(f"\n{decoder.name}, batch {len(ids)}: a decode step, by operation")
        steps = new_tokens - 1
        before = {event.key: event for event in prefill.key_averages()}
        found = []
        for event in full_run.key_averages():
            time = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            calls = event.count
            if event.key in before:
                earlier = before[event.key]
                time -= earlier.self_device_time_total if on_cuda else earlier.self_cpu_time_total
                calls -= earlier.count
            if time > 0:  # operations of the prefill alone differ slightly between the two runs, and may be negative
                found.append((time / steps, calls / steps, event.key))
        total = sum(time for time, _, _ in found)
        rows = [
            (name if len(name) <= 72 else f"{name[:71]}…", f"{calls:.1f}", f"{time:.0f}", f"{100 * time / total:.1f} %")
            for time, calls, name in sorted(found, reverse=True)[:15]
        ]
        rows.append(("all", "", f"{total:.0f}", "100 %"))
        console.print(Table(("operation", "calls", "microseconds", "share"), rows, left=1).to_rich())
