"""The slot error rate of E2E NLG, ViGGO and WebNLG for `evaluate`: `evaluate.load("eval/metrics/slot_error_rate")`."""

from eval.score import loadable
from eval.score.slot_errors import SLOT_ERROR_RATE


class SlotErrorRate(loadable.Loadable):
    """As in `eval.score.slot_errors`, from the root of the repository."""

    metrics = (SLOT_ERROR_RATE,)
