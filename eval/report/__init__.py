"""Finished evaluations side by side, as a page: `python -m eval.report`."""
