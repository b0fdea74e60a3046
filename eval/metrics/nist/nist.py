"""NIST for `evaluate`: `evaluate.load("eval/metrics/nist")`."""

from eval.score import loadable
from eval.score.nist import NIST


class Nist(loadable.LoadableOfWords):
    """As in `eval.score.nist`, from the root of the repository."""

    metrics = (NIST,)
