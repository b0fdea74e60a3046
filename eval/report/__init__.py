"""The comparison page of finished evaluations: `python -m eval.report`."""
