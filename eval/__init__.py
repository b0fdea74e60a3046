"""Evaluation: decoding a test set at several speeds, scores, wall clock, the report."""
