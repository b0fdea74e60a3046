"""CIDEr-D for `evaluate`: `evaluate.load("eval/metrics/cider")`."""

from eval.score import loadable
from eval.score.cider import CIDER


class Cider(loadable.LoadableOfWords):
    """As in `eval.score.cider`, from the root of the repository."""

    metrics = (CIDER,)
