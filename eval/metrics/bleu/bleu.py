"""BLEU for `evaluate`: `evaluate.load("eval/metrics/bleu")`."""

from eval.score import loadable
from eval.score.bleu import BLEU


class Bleu(loadable.LoadableOfWords):
    """As in `eval.score.bleu`, from the root of the repository."""

    metrics = (BLEU,)
