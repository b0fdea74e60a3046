"""Continuous batching: requests of different lengths and target speedups that decode together."""
