"""Speed of decoding under schedules, beside what else a user could pick: `python -m eval.speed`."""
