"""Training under schedules in a script of your own, and what `train.py` is built on.

Needs torch and transformers; `SkipTrainingMixin` also needs accelerate, as transformers' Trainer does.
"""

from typing import TYPE_CHECKING

from skipdecode import _lazy_names

if TYPE_CHECKING:
    from skipdecode.training.collator import PromptCompletionCollator, split_answers
    from skipdecode.training.layer_order import find_order
    from skipdecode.training.mixin import SkipTrainingMixin
    from skipdecode.training.objective import Objective
    from skipdecode.training.sampling import ScheduleSampler, make_sampler
    from skipdecode.training.saving import save_skip_files
    from skipdecode.training.step import step_loss, step_losses

__all__ = [
    "Objective",
    "PromptCompletionCollator",
    "ScheduleSampler",
    "SkipTrainingMixin",
    "find_order",
    "make_sampler",
    "save_skip_files",
    "split_answers",
    "step_loss",
    "step_losses",
]

# Public names are imported when they are first used: transformers' Trainer takes seconds.
_HOMES = {
    "Objective": "objective",
    "PromptCompletionCollator": "collator",
    "ScheduleSampler": "sampling",
    "SkipTrainingMixin": "mixin",
    "find_order": "layer_order",
    "make_sampler": "sampling",
    "save_skip_files": "saving",
    "split_answers": "collator",
    "step_loss": "step",
    "step_losses": "step",
}

__getattr__, __dir__ = _lazy_names(__name__, _HOMES)
