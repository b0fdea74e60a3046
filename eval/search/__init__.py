"""The best schedule for a budget, found on validation data: `python -m eval.search`."""
