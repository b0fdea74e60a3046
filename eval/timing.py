"""How fast systems decode in batches of other sizes than the test set's."""

from dataclasses import dataclass

from eval.decoding import Decoded
from skipdecode.ratio import Ratio

TIMING_HEADS = (
    "system",
    "batch",
    "prompts",
    "layers per step",
    "measured speed",
    "prefill s",
    "decode s",
    "tokens/s",
)
# Prompts that are timed where the user says nothing: enough batches for quartiles, and enough rows to be worth a batch.
LEAST_PROMPTS, BATCHES = 24, 8


@dataclass(frozen=True)
class Timing:
    """One system at one batch size.

    Attributes:
        batch_size: prompts decoded together.
        prompts: the first so many of the test set.
        layers_per_step: layers that a batch ran per decode step: where rows differ, those of the deepest.
        speedup: the 1x row's seconds per decode step over this row's, over the batches.
        prefill_seconds, decode_seconds: of all batches.
        tokens_per_second: of decoding.
    """

    batch_size: int
    prompts: int
    layers_per_step: float
    speedup: Ratio
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float

    @classmethod
    def of(cls, decoded: Decoded, baseline: Decoded, batch_size: int) -> "Timing":
        """Of a system that took turns with that of the 1x row."""
        return cls(
            batch_size=batch_size,
            prompts=len(decoded.predictions),
            layers_per_step=decoded.layers_per_step,
            speedup=decoded.speed_over(baseline),
            prefill_seconds=decoded.prefill_seconds,
            decode_seconds=decoded.decode_seconds,
            tokens_per_second=decoded.tokens_per_second,
        )

    def cells(self) -> list[str]:
        """What stands below TIMING_HEADS, after the system."""
        return [
            str(self.batch_size),
            str(self.prompts),
            f"{self.layers_per_step:.2f}",
            str(self.speedup),
            f"{self.prefill_seconds:.2f}",
            f"{self.decode_seconds:.2f}",
            f"{self.tokens_per_second:.0f}",
        ]


def timed_prompts(batch_size: int, limit: int | None, available: int) -> int:
    """How many prompts are timed at a batch size: `limit`, or a few batches; at most those that there are."""
    return min(available, limit or max(LEAST_PROMPTS, BATCHES * batch_size))
