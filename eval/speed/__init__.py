"""The speed benchmark of decoding with schedules, with other libraries as peers: `python -m eval.speed`."""
