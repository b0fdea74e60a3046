"""`python -m skipdecode`, where the command isn't on the path, or another checkout's is."""

from skipdecode.cli.options import run_and_leave

run_and_leave()
