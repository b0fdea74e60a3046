"""What SkipDecode is compared with, each a change of the recipe that trains it (docs/rivals.md)."""

from dataclasses import dataclass

from scripts.experiments.variants import Variants

# Full depth in every step, whatever the recipe draws from.
FULL_DEPTH = (
    "schedule.speedups=[1]",
    "schedule.speedup_range=null",
    "schedule.files=null",
    "schedule.weights=null",
)
EXITS = (*FULL_DEPTH, "optim.exits=all", "optim.depth_weight_power=1")


@dataclass(frozen=True)
class Rival:
    """A way to train and decode.

    Attributes:
        what: one line.
        overrides: of the recipe.
        as_fast_as: a target; the model is a shallow one, of as many layers as the recipe's mean budget at it.
    """

    what: str
    overrides: tuple[str, ...] = ()
    as_fast_as: float | None = None

    def resolve(self, variants: Variants) -> tuple[str, ...]:
        """All overrides, with the layers of a shallow model. Raises ConfigError for a target out of reach."""
        if self.as_fast_as is None:
            return self.overrides
        return (*self.overrides, f"model.layers={variants.mean_layers(self.as_fast_as)}")


def _skipdecode(what: str, *overrides: str) -> Rival:
    return Rival(what, tuple(f"schedule.{override}" for override in overrides))


RIVALS: dict[str, Rival] = {
    "full-depth": Rival("every layer in every step: no skipping is learnt", FULL_DEPTH),
    "skipdecode": Rival("the recipe as it is"),
    "skipdecode-prompt-max": _skipdecode("the prompt runs the layers of the largest budget, not all", "prompt=max"),
    "skipdecode-constant": _skipdecode("the budget doesn't fall", "decay=constant"),
    "skipdecode-power": _skipdecode("it falls late, as a power of the position", "decay=power"),
    "skipdecode-exponential": _skipdecode("it falls early, exponentially", "decay=exponential"),
    "skipdecode-cosine": _skipdecode("it falls along half a cosine", "decay=cosine"),
    "skipdecode-step": _skipdecode("it falls in plateaus", "decay=step"),
    "early-termination": _skipdecode("the layers that run are the lowest, not the highest", "placement=bottom"),
    "warmup-2": _skipdecode("two layers at the bottom always run", "warmup_layers=2"),
    "warmup-3": _skipdecode("three layers at the bottom always run", "warmup_layers=3"),
    "unified": _skipdecode("Unified Layer Skipping: a constant budget, spread", "placement=even", "decay=constant"),
    "d3": _skipdecode("D3: an exponential decay, both ends of the stack kept", "placement=ends", "decay=exponential"),
    "shallow-2x": Rival("a model of as many layers as the mean budget at 2x", FULL_DEPTH, as_fast_as=2),
    "shallow-3x": Rival("a model of as many layers as the mean budget at 3x", FULL_DEPTH, as_fast_as=3),
    "shallow-4x": Rival("a model of as many layers as the mean budget at 4x", FULL_DEPTH, as_fast_as=4),
    "early-exit": Rival("multi-layer early exit: a loss after each layer, as CALM", (*EXITS, "optim.distillation=0")),
    "early-exit-distilled": Rival("the same, each exit taught by the last", (*EXITS, "optim.distillation=1")),
}
