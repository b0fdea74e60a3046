"""Publishing a finished run: what is sent of it, what must not leave with it, and the sending."""
