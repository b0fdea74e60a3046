"""METEOR for `evaluate`: `evaluate.load("eval/metrics/meteor")`."""

from eval.score import loadable
from eval.score.meteor import METEOR


class Meteor(loadable.Loadable):
    """As in `eval.score.meteor`, from the root of the repository."""

    metrics = (METEOR,)
