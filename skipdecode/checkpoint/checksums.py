"""Seals: what a checkpoint's files were when they were written, so that damage is seen before anything is decoded."""

import functools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from skipdecode.errors import ConfigError
from skipdecode.files import write_whole

SEAL = "complete.json"  # the last file that is written: every sealed one with its size and checksum
# What texts follow from. Not what its owner may well change: the card, the recipe, generation_config.json, a chat
# template; nor custom_generate/, which publishing writes anew.
DECISIVE = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "skipdecode.json", "*.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
)
_BLOCK = 2**24


def decisive_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder that its texts follow from, by name."""
    return sorted({file for pattern in DECISIVE for file in folder.glob(pattern) if file.is_file()})


def seal(folder: Path, files: Sequence[Path] | None = None) -> None:
    """Write down the files of a folder (default: the decisive ones), after each is on the disk and not in a buffer."""
    sealed: dict[str, bytes | Path] = {}
    for file in decisive_files(folder) if files is None else sorted(files):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        sealed[file.relative_to(folder).as_posix()] = file
    write_whole(folder / SEAL, seal_text(sealed))


def seal_text(sealed: Mapping[str, bytes | Path]) -> str:
    """The seal of these contents, or files, by their names."""
    values = {
        name: [len(content), zlib.crc32(content)]
        if isinstance(content, bytes)
        else [content.stat().st_size, checksum(content)]
        for name, content in sealed.items()
    }
    return json.dumps(values, indent=1) + "\n"


def damage(folder: Path, *, decisive: bool = False, partly_here: bool = False) -> str | None:
    """The first thing in a sealed folder that isn't as it was written; None where all is.

    Args:
        folder: with a seal in it.
        decisive: look at the files alone that texts follow from, and at whether there are others of the kind.
        partly_here: a file that is missing isn't damage: a download fetches files when they are asked for.
    """
    try:
        values = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        sealed = {str(name): (int(size), int(crc)) for name, (size, crc) in values.items()}
    except FileNotFoundError:
        return f"it has no {SEAL}"
    except (ValueError, TypeError, AttributeError, OSError):
        return f"its {SEAL} can't be read"
    for name, (size, crc) in sealed.items():
        file = folder / name
        if decisive and not any(fnmatch(name, pattern) for pattern in DECISIVE):
            continue
        if not file.is_file():
            if partly_here:
                continue
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if checksum(file) != crc:
            return f"{name} has changed since it was written"
    added = [file.name for file in decisive_files(folder) if file.name not in sealed] if decisive else []
    return f"{added[0]} was added since it was written" if added else None


def check_seal(folder: Path, *, partly_here: bool = False) -> None:
    """Check the decisive files of a folder, where it is sealed.

    Each file is read once in a process, at the pace of the disk (a second or two a gigabyte; loading reads it from
    memory then), and again where it has changed since.

    Raises:
        ConfigError: for a folder that isn't as it was written.
    """
    if not (folder / SEAL).exists():
        return
    found = damage(folder, decisive=True, partly_here=partly_here)
    if found is not None:
        raise ConfigError(
            f"{folder} is damaged: {found}; take a good copy of it, or, if you changed it on purpose, remove "
            f"{folder / SEAL}"
        )


def checksum(file: Path) -> int:
    """CRC-32: it is there for damage by accident, and keeps pace with a disk."""
    status = file.stat()
    return _checksum(str(file.resolve()), status.st_size, status.st_mtime_ns)


@functools.cache
def _checksum(file: str, size: int, modified: int) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
