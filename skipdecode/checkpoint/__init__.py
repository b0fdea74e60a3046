"""Checkpoints: loading and checking, stored schedules, exports with fewer layers, and the code that they contain."""
