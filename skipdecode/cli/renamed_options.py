"""Options of commands that have a new name."""

import argparse
import sys
from typing import Any


def add_old_name(parser: argparse.ArgumentParser, old: str, option: argparse.Action) -> None:
    """Let `old` stand for an option of the parser: it warns on standard error, and the help doesn't list it."""

    class Renamed(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            print(f"warning: {old} is deprecated: use {option.option_strings[0]}", file=sys.stderr)
            option(parser, namespace, values, option_string)

    how: Any = {"nargs": option.nargs, "type": option.type, "metavar": option.metavar, "dest": option.dest}
    parser.add_argument(old, action=Renamed, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)
