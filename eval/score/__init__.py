"""Scores of texts: every metric in a file of its own, one registry of them, `python -m eval.score`."""
