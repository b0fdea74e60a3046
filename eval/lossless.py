"""The speed of lossless decoding as a system of the report drafts, on some of the test set's texts."""

import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eval.console import bar_columns
from eval.decoding import spread_over_lengths
from eval.systems.base import LosslessSystem, SkipSystem
from skipdecode import SkipSchedule
from skipdecode.generate.runners import why_no_fast_path

PROMPTS = 64  # whose texts are decoded


def time_lossless(
    system: SkipSystem, prompts: Sequence[list[int]], lengths: Sequence[int], console: Console
) -> float | None:
    """Times that lossless decoding, as `system` drafts it, is faster than full depth on full depth's texts.

    Texts from all over the test set are decoded one by one, both ways in turns, twice: the first time warms up, and
    shows how often drafts are taken. It is the median over texts. Of so few it says what a row of all would show to
    about a tenth; from acceptance and the time of passes it was no nearer and took longer (docs/decisions/0017).

    Args:
        system: whose schedule drafts.
        prompts: token ids.
        lengths: tokens of full depth's text behind each prompt, its end token included.
        console: for the progress bar.

    Returns:
        None where steps can't be lean, which drafts need, and where no text has a decode step.
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
        *bar_columns(), MofNCompleteColumn(), TextColumn("texts"), TimeElapsedColumn(), console=console
    ) as bar:
        for n in bar.track([*drawn, *drawn], description=f"lossless at {system.label}"):
            slow, fast = (each.decode([prompts[n]], lengths[n], [lengths[n]]) for each in (full, lossless))
            ratios.append(slow.decode_seconds / fast.decode_seconds)
    return statistics.median(ratios[len(drawn) :])
