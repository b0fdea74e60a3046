"""Servers under load: requests that come at random, and how long they wait: `python -m eval.load`."""
