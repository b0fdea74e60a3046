"""`skipdecode serve` with slow steps, so that tests can interfere with requests that haven't ended."""

import sys
import time

from skipdecode import Engine
from skipdecode.cli.options import main

_step = Engine.step


def _slow_step(self: Engine) -> bool:
    decoded = _step(self)
    if decoded:
        time.sleep(0.01)
    return decoded


Engine.step = _slow_step  # type: ignore[method-assign]
sys.exit(main(["serve", *sys.argv[1:]]))
