"""Training under sampled skip schedules."""

import logging

# transformers' Trainer imports bitsandbytes, where it is installed, which warns of a kernel that isn't used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
