"""A checkpoint's checksum file: sizes and checksums of its files, which reveal damage before decoding starts."""

import functools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from skipdecode.errors import ConfigError
from skipdecode.files import write_atomically

CHECKSUMS_FILE = "complete.json"  # written last; file name -> [size in bytes, CRC-32]
# The files that determine what a checkpoint generates. Files that users may well edit aren't listed (the model card,
# the recipe, generation_config.json, a chat template), nor is custom_generate/, which publishing rewrites.
CHECKED_PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "skipdecode.json", "*.py"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
)
_BLOCK = 2**24


def checked_files(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder that match `CHECKED_PATTERNS`, sorted by name."""
    return sorted({file for pattern in CHECKED_PATTERNS for file in folder.glob(pattern) if file.is_file()})


def write_checksums(folder: Path, files: Sequence[Path] | None = None) -> None:
    """Sync files (default: `checked_files`) to disk and write the checksum file of their folder."""
    contents: dict[str, bytes | Path] = {}
    for file in checked_files(folder) if files is None else sorted(files):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        contents[file.relative_to(folder).as_posix()] = file
    write_atomically(folder / CHECKSUMS_FILE, checksums_text(contents))


def checksums_text(contents: Mapping[str, bytes | Path]) -> str:
    """The text of a checksum file for files, given by name as their content or their path."""
    values = {
        name: [len(content), zlib.crc32(content)]
        if isinstance(content, bytes)
        else [content.stat().st_size, checksum(content)]
        for name, content in contents.items()
    }
    return json.dumps(values, indent=1) + "\n"


def find_damage(folder: Path, *, checked_only: bool = False, allow_missing: bool = False) -> str | None:
    """Describe the first file of a folder that differs from its checksum file; None where all agree.

    Args:
        checked_only: consider only files that match `CHECKED_PATTERNS`, and report added ones.
        allow_missing: accept missing files, since a download fetches each file when it is first used.
    """
    try:
        values = json.loads((folder / CHECKSUMS_FILE).read_text(encoding="utf-8"))
        expected = {str(name): (int(size), int(crc)) for name, (size, crc) in values.items()}
    except FileNotFoundError:
        return f"it has no {CHECKSUMS_FILE}"
    except (ValueError, TypeError, AttributeError, OSError):
        return f"its {CHECKSUMS_FILE} can't be read"
    for name, (size, crc) in expected.items():
        file = folder / name
        if checked_only and not any(fnmatch(name, pattern) for pattern in CHECKED_PATTERNS):
            continue
        if not file.is_file():
            if allow_missing:
                continue
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if checksum(file) != crc:
            return f"{name} has changed since it was written"
    added = [file.name for file in checked_files(folder) if file.name not in expected] if checked_only else []
    return f"{added[0]} was added since it was written" if added else None


def verify_checksums(folder: Path, *, allow_missing: bool = False) -> None:
    """Compare the checked files of a folder with its checksum file, where it has one.

    Each file is read once per process, and again when it has changed. This takes a second or two per gigabyte from
    disk; loading then finds the file in memory. Raises ConfigError for a file that has changed, was added, or is
    missing (unless `allow_missing`).
    """
    if not (folder / CHECKSUMS_FILE).exists():
        return
    found = find_damage(folder, checked_only=True, allow_missing=allow_missing)
    if found is not None:
        raise ConfigError(
            f"{folder} is damaged: {found}; use an intact copy, or, if you changed it on purpose, remove "
            f"{folder / CHECKSUMS_FILE}"
        )


def checksum(file: Path) -> int:
    """The CRC-32 of a file: it detects accidental damage, and is as fast as a disk."""
    status = file.stat()
    return _checksum(str(file.resolve()), status.st_size, status.st_mtime_ns)


@functools.cache
def _checksum(file: str, size: int, modified: int) -> int:
    value = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value
