"""A journal keeps all complete entries when its process is killed at any moment."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoints import in_hub_cache

from eval.journal import Journal
from eval.loading import weights_identity
from skipdecode import ConfigError
from skipdecode.checkpoint.checksums import checksum

HEADER = {"batch_size": 4, "schedules": {"2x": {"max_layers": 6}}, "machine": {"threads": 1}}
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)  # with line ends of every kind
values = st.lists(st.one_of(texts, st.floats(allow_nan=False, allow_infinity=False), st.integers()), max_size=4)
entries = st.lists(st.tuples(st.tuples(texts, texts), values), max_size=6, unique_by=lambda entry: entry[0])


def held(journal: Journal, entries: list[Any]) -> int:
    """The number of entries in the journal, after checking that they are the first ones."""
    count = len(journal)
    for number, (key, value) in enumerate(entries):
        assert (key in journal) == (number < count)
        assert key not in journal or journal[key] == value
    return count


@given(entries=entries, data=st.data())
def test_a_journal_truncated_at_any_byte_keeps_its_first_entries_and_can_be_continued(
    entries: list[Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path, HEADER)
    ends = []
    for key, value in entries:
        journal.add(key, value)
        ends.append(path.stat().st_size)
    assert path.exists() == bool(entries)
    size = data.draw(st.integers(0, ends[-1] if ends else 0))
    if entries:
        path.write_bytes(path.read_bytes()[:size])
    again = Journal(path, HEADER)
    count = held(again, entries)
    assert count == sum(end <= size for end in ends)  # no complete entry is lost
    for key, value in entries[count:]:
        again.add(key, value)
    assert held(Journal(path, HEADER), entries) == len(entries)
    if entries:
        assert [json.loads(line) for line in path.read_bytes().splitlines()][1:] == [[list(k), v] for k, v in entries]


def test_a_last_line_with_missing_content_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, HEADER)
    journal.add(("a",), 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 40 + b"]]\n")  # after a crash of the machine: one of two blocks was on the disk
    again = Journal(path, HEADER)
    again.add(("b",), 2)
    assert path.read_bytes() == whole + b'[["b"], 2]\n'


def test_a_journal_of_another_evaluation_is_refused_with_the_differences(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, HEADER).add(("a",), 1)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"\(batch_size was 4, is 8, schedules.2x.max_layers was 6, is 7"):
        Journal(path, {**HEADER, "batch_size": 8, "schedules": {"2x": {"max_layers": 7}}})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"my notes\n", b'{"format": 1}\nnot json\n[["a"], 1]\n', b"[1]\n[2]\n"])
def test_a_file_that_is_not_a_journal_is_refused_and_not_changed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged, or not a journal of this kind|belongs to another evaluation"):
        Journal(path, HEADER)
    assert path.read_bytes() == content


def test_a_journal_creates_no_file_before_the_first_entry(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out" / "journal.jsonl", HEADER)
    assert not (tmp_path / "out").exists()
    journal.remove()


def test_a_journal_without_a_path_is_in_memory() -> None:
    journal = Journal()
    journal.add(("a", "1"), [1, 2])
    assert ("a", "1") in journal
    assert journal["a", "1"] == [1, 2]


def adapters_of(base: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_text("{}")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def test_the_identity_of_adapters_includes_their_base_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for file in ("config.json", "model.safetensors"):
        (base / file).write_text("{}")
    apart = adapters_of(str(base), tmp_path / "apart")
    before = weights_identity(str(apart))
    assert before.keys() == {"adapter_model.safetensors", "adapter_config.json", "base"}
    assert before["base"] == weights_identity(str(base))
    Journal(tmp_path / "journal.jsonl", {"checkpoint": before}).add(("a",), 1)
    contents = weights_identity(str(apart), checksum)
    (base / "model.safetensors").write_text("{ }")
    with pytest.raises(ConfigError, match=r"another evaluation \(checkpoint\.base\.model\.safetensors"):
        Journal(tmp_path / "journal.jsonl", {"checkpoint": weights_identity(str(apart))})
    assert weights_identity(str(apart), checksum) != contents  # as compared between processes
    (apart / "config.json").write_text("{}")  # merged: it no longer depends on the base
    assert "base" not in weights_identity(str(apart))


@pytest.mark.parametrize("adapters_too", [False, True])
def test_the_identity_of_hub_adapters_includes_their_commit(
    adapters_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the base model is another repository with its own commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("skipdecode.checkpoint.offline._answers", lambda address: False)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    name = str(adapters_of("me/base", tmp_path / "apart"))
    snapshots = {"me/base": in_hub_cache(base, tmp_path / "cache", "me/base")}
    if adapters_too:
        snapshots["me/apart"] = in_hub_cache(Path(name), tmp_path / "cache", "me/apart")
        name = "me/apart"
    before = weights_identity(name)
    assert before["base"] == {"name": "me/base", "commit": "0" * 40}
    assert before.get("commit") == ("0" * 40 if adapters_too else None)
    for snapshot in snapshots.values():
        was = weights_identity(name)
        snapshot.rename(snapshot.with_name("1" * 40))
        (snapshot.parent.parent / "refs" / "main").write_text("1" * 40)
        assert weights_identity(name) != was
