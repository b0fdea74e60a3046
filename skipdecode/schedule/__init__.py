"""Schedules (which layers run for which token), cost models, and the solver for a target speedup."""
