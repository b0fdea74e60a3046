"""Text from elsewhere: `<!-- help: -m eval -->` becomes a command's --help, `<!-- include: FILE -->` a file's text."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_HELP = re.compile(r"<!-- help: (.+?) -->")
_INCLUDE = re.compile(r"<!-- include: (.+?) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls for each page."""
    markdown = _INCLUDE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), markdown)
    return _HELP.sub(lambda match: f"```text\n{_help(match[1])}\n```", markdown)


def _help(command: str) -> str:
    environment = {**os.environ, "COLUMNS": "88", "NO_COLOR": "1"}
    words = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rstrip()
