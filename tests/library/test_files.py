"""Files are written atomically."""

import threading
from pathlib import Path

import pytest

from skipdecode.files import atomic_replacement, write_atomically


def test_concurrent_writers_leave_the_complete_file_of_one_of_them(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    texts = [letter * size for letter, size in (("a", 50_000), ("b", 90_000))]
    failed: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(40):
                write_atomically(file, text)
                if file.read_text() not in texts:
                    raise AssertionError("damaged")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    write_atomically(file, "before")

    def break_off(error: BaseException) -> None:
        with atomic_replacement(file) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(KeyboardInterrupt):
        break_off(KeyboardInterrupt())
    with pytest.raises(OSError, match=r"No space left on device: '.*/file\.json'"):
        break_off(OSError(28, "No space left on device"))
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
