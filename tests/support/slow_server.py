"""`skipdecode serve` with steps that take a while, so that a test can look at texts that haven't ended."""

import sys
import time

from skipdecode import Engine
from skipdecode.cli import options as cli

_step = Engine.step


def _slow_step(self: Engine) -> bool:
    decoded = _step(self)
    if decoded:
        time.sleep(0.01)
    return decoded


Engine.step = _slow_step  # type: ignore[method-assign]
sys.exit(cli.main(["serve", *sys.argv[1:]]))
