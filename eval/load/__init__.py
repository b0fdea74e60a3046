"""The load test of servers: `python -m eval.load`."""
