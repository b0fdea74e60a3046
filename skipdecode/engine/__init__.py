"""Continuous batching: requests of different lengths and speeds that decode together."""
