"""Evaluation: decode a test set at several speeds, compute scores, measure wall-clock time and write reports."""
