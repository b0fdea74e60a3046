"""The speedup of self-speculative decoding with a system's schedule as the draft, on a sample of the test set."""

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.console import bar_columns
from eval.decoding import spread_over_lengths
from eval.systems.base import LosslessSystem, SkipSystem
from skipdecode import SkipSchedule
from skipdecode.generate.runners import why_no_fast_path

PROMPTS = 64  # size of the sample


def time_lossless(
    system: SkipSystem, prompts: Sequence[list[int]], lengths: Sequence[int], console: Console
) -> float | None:
    """The median decode speedup of lossless decoding over full depth at batch 1, drafting with `system`'s schedule.

    A sample of prompts, spread evenly over the test set, is decoded at batch 1 by both systems in turns, twice: the
    first pass is the warm-up and measures the acceptance rate. The result is within about 10 % of that of the whole
    test set; an estimate from acceptance rate and step times was no more accurate and slower (docs/decisions/0017).

    Args:
        system: the system whose schedule drafts.
        prompts: token ids of each prompt.
        lengths: the number of tokens that full depth generates for each prompt, including the end token.
        console: the console of the progress bar.

    Returns:
        The speedup; None for a model without a fast path, which drafts need, and where no sequence has a decode step.
    """
    checkpoint = system.checkpoint
    if why_no_fast_path(checkpoint.model, checkpoint.model.generation_config, False, {}) is not None:
        return None
    drawn = [n for n in spread_over_lengths(list(map(len, prompts)), PROMPTS) if lengths[n] > 1]
    if not drawn:
        return None
    full = SkipSystem("1x", checkpoint, SkipSchedule.full_depth(checkpoint.num_layers))
    lossless = LosslessSystem(system.label, checkpoint, system.schedule)
    ratios: list[float] = []
    with Progress(
        *bar_columns(), MofNCompleteColumn(), TextColumn("prompts"), TimeElapsedColumn(), console=console
    ) as bar:
        for n in bar.track([*drawn, *drawn], description=f"lossless at {system.label}"):
            slow, fast = (each.decode([prompts[n]], lengths[n], [lengths[n]]) for each in (full, lossless))
            ratios.append(slow.decode_seconds / fast.decode_seconds)
    return statistics.median(ratios[len(drawn) :])
