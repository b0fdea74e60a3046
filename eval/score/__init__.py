"""Metrics, one module each, with a registry, and scores of predictions: `python -m eval.score`."""
