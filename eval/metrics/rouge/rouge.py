"""ROUGE-1, ROUGE-2 and ROUGE-L for `evaluate`: `evaluate.load("eval/metrics/rouge")`."""

from eval.score import loadable
from eval.score.rouge import ROUGE


class Rouge(loadable.LoadableOfWords):
    """As in `eval.score.rouge`, from the root of the repository."""

    metrics = ROUGE
