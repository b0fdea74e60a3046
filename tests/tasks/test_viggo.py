"""The ViGGO task: reading, prompts of dialogue acts, delexicalisation, restoring, and errors."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import load_task
from data.viggo import ACTS, SLOTS, ViGGO, parse_act
from skipdecode import ConfigError

HEADER = "mr,ref\n"
MR = "inform(name[Dirt: Showdown], developer[EA], esrb[E 10+ (for Everyone 10 and Older)], genres[racing, sport])"


def folder_with(tmp_path: Path, rows: str) -> Path:
    for name in ("train.csv", "valid.csv", "test.csv"):
        (tmp_path / name).write_text(HEADER + rows, encoding="utf-8")
    return tmp_path


@given(st.sampled_from(ACTS), st.dictionaries(st.sampled_from(SLOTS), st.text("abc ,:+(é'", max_size=8), min_size=1))
def test_a_meaning_representation_parses_to_its_act_and_its_slots_in_order(act: str, slots: dict[str, str]) -> None:
    meaning = parse_act(f"{act}({', '.join(f'{slot}[{value}]' for slot, value in slots.items())})")
    assert meaning.act == act
    assert list(meaning.slots.items()) == [(slot, value.strip()) for slot, value in slots.items()]


def test_rows_with_the_same_meaning_form_one_example(tmp_path: Path) -> None:
    rows = f'"{MR}",Dirt: Showdown is a racer by EA.\n"request_attribute(esrb[])",Do you mind ratings?\n"{MR}",EA!\n'
    first, second = ViGGO(str(folder_with(tmp_path, rows))).load("test")
    assert first.prompt == (
        "inform | name: Dirt: Showdown | developer: EA | esrb: E 10+ (for Everyone 10 and Older) | "
        "genres: racing, sport\n"
    )
    assert first.references == first.targets == ("Dirt: Showdown is a racer by EA.", "EA!")
    assert (first.id, first.meaning) == ("viggo-test-0", MR)
    assert second.prompt == "request_attribute | esrb:\n"


def test_restoring_replaces_slots_and_corrects_articles_and_capitals(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, f'"{MR}",dirt: showdown by EA.\n')
    task = ViGGO(str(folder), delexicalise=["name", "developer"])
    (example,) = task.load("train")
    assert example.prompt.startswith("inform | name: Xname | developer: Xdeveloper | esrb: E 10+")
    assert example.targets == ("Xname by Xdeveloper.",)
    assert task.restore(example, "Xname. it is a Xdeveloper game. ") == "Dirt: Showdown. It is an EA game."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n", "must name the columns mr and ref"),
        (HEADER + '"inform(name[A])",\n', "line 2: mr and ref must not be empty"),
        (HEADER + '"name[A]",text\n', "line 2: not a meaning representation"),
        (HEADER + '"infrom(name[A])",text\n', "line 2: not a meaning representation"),
        (HEADER + '"inform(nmae[A])",text\n', r"near 'nmae\[A\]'"),
        (HEADER + '"inform(name[A], name[B])",text\n', "line 2: not a meaning representation"),
        (HEADER + '"inform(name)",text\n', "line 2: not a meaning representation"),
        (HEADER + '"inform()",text\n', "without slots"),
    ],
)
def test_the_error_for_a_malformed_row_names_the_file_and_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "train.csv").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        ViGGO(str(tmp_path)).load("train")
    assert "train.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_names_missing_files_and_unknown_slots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'name'"):
        load_task("viggo", delexicalise=["nme"])
    with pytest.raises(ConfigError, match="list each slot once"):
        load_task("viggo", delexicalise=["name", "name"])
    with pytest.raises(ConfigError, match="no such folder"):
        load_task("viggo", path=str(tmp_path / "nowhere")).load("train")
    with pytest.raises(ConfigError, match=r"it has no valid\.csv"):
        load_task("viggo", path=str(tmp_path)).load("validation")


def test_without_a_folder_the_hubs_own_columns_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    def load_dataset(repository: str, **options: str) -> list[dict[str, str]]:
        asked.append((repository, options))
        return [{"meaning_representation": MR, "target": "One."}, {"meaning_representation": MR, "target": "Two."}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (example,) = ViGGO().load("validation")
    assert example.references == ("One.", "Two.")
    assert asked == [("GEM/viggo", {"revision": "refs/convert/parquet", "split": "validation"})]


def test_a_bad_row_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda repository, **options: [{"meaning_representation": MR}])
    with pytest.raises(ConfigError, match="GEM/viggo, train, row 1: no column 'target', only meaning_representation"):
        ViGGO().load("train")


def test_the_real_data_has_its_published_size(shared_data: Path) -> None:
    task = ViGGO(str(shared_data / "viggo"), delexicalise=["name", "developer"])
    sizes = [sum(len(example.references) for example in task.load(split)) for split in ("train", "validation", "test")]
    assert sizes == [5103, 714, 1083]
    example = task.load("test")[0]
    assert task.restore(example, example.targets[0]).lower() == example.references[0].lower()
