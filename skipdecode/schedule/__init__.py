"""Which layers run for which token: schedules, their cost on a machine, and the schedule for a target speedup."""
