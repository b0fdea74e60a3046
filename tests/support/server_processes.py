"""Waiting for a server that runs in a process of its own."""

import re
import subprocess


def announced_address(process: "subprocess.Popen[str]") -> str:
    """Read a server's stderr until it says where it listens. Fails with what it wrote if it ends before."""
    assert process.stderr is not None
    lines = []
    while not (found := re.search(r"on (http://127\.0\.0\.1:\d+)/v1", lines[-1] if lines else "")):
        line = process.stderr.readline()
        assert line, "".join(lines)
        lines.append(line)
    return found[1]
