"""Every command that opens a checkpoint, for what all of them must refuse."""

from collections.abc import Callable
from pathlib import Path

import eval.cli
import eval.search.cli
import eval.speed.cli
import skipdecode.cli.options


def opening_commands(name: str, folder: Path) -> list[Callable[[], int]]:
    """Calls of the commands that open the checkpoint `name` and write into `folder`; each gives its exit code."""
    return [
        lambda: skipdecode.cli.options.main(["generate", name, "hello"]),
        lambda: skipdecode.cli.options.main(["info", name]),
        lambda: skipdecode.cli.options.main(["compare", name, "hello"]),
        lambda: skipdecode.cli.options.main(["export", name, str(folder / "out"), "--speedup", "2"]),
        lambda: eval.cli.main(["--checkpoint", name, "--output", str(folder / "out")]),
        lambda: eval.search.cli.main(["--checkpoint", name, "--speedup", "2", "--output", str(folder / "out")]),
        lambda: eval.speed.cli.main(["--model", name, "--output", str(folder / "out.json")]),
    ]
