"""Measuring decoding: the time of each step, sides that take turns, and the calibration of a machine."""
