"""WebNLG: reading the challenge's XML and the Hub's form, prompts, names hidden and put back, and what is refused."""

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import load_task
from data.webnlg import UNSEEN, WebNLG, hide_names, linearise
from skipdecode import ConfigError

CITY = ("Aarhus_Airport | cityServed | Aarhus", "Aarhus | leaderName | Jacob_Bundsgaard")
ENTITIES = ["Aarhus_Airport", "Ørsted", "Buzz_Aldrin", '"San José, California"', "1963", "Madrid–Barajas_Airport"]


def entry(category: str, triples: tuple[str, ...], texts: dict[str, str]) -> str:
    inner = "".join(f"<mtriple>{escape(triple)}</mtriple>" for triple in triples)
    lex = "".join(f'<lex comment="{comment}">{escape(text)}</lex>' for text, comment in texts.items())
    other = "<originaltripleset><otriple>not | read | here</otriple></originaltripleset>"
    return f'<entry category="{category}" eid="Id1">{other}<modifiedtripleset>{inner}</modifiedtripleset>{lex}</entry>'


def folder_with(tmp_path: Path, *entries: str) -> Path:
    content = f"<benchmark><entries>{''.join(entries)}</entries></benchmark>"
    for name in ("train/1triples/a.xml", "dev/1triples/a.xml", "test/testdata_with_lex.xml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def test_an_entry_is_an_example_of_its_modified_triples_and_good_texts(tmp_path: Path) -> None:
    texts = {"Aarhus Airport serves Aarhus, led by Jacob Bundsgaard.": "good", "Arhus.": "toFix", "It is.": "good"}
    folder = folder_with(tmp_path, entry("Airport", CITY, texts), entry("Artist", CITY[1:], {"Led.": "good"}))
    (folder / "test" / "testdata_unseen_with_lex.xml").write_text("not read", encoding="utf-8")
    first, second = WebNLG(str(folder)).load("test")
    assert first.prompt == "Aarhus Airport : city served : Aarhus | Aarhus : leader name : Jacob Bundsgaard\n"
    assert first.references == first.targets == (next(iter(texts)), "It is.")
    assert (first.id, first.part) == ("webnlg-test-0", "seen")
    assert (second.id, second.part) == ("webnlg-test-1", "unseen")
    assert {example.part for example in WebNLG(str(folder)).load("train")} == {""}


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, entry("Airport", CITY, {"one": "good"}))
    (folder / "train" / "2triples").mkdir()
    later = (folder / "train" / "1triples" / "a.xml").read_text().replace("one", "two")
    (folder / "train" / "2triples" / "a.xml").write_text(later)
    assert [example.references for example in WebNLG(str(folder)).load("train")] == [("one",), ("two",)]


@given(st.lists(st.sampled_from(ENTITIES), min_size=2, max_size=6, unique=True), st.data())
def test_names_that_are_hidden_and_put_back_are_the_names(names: list[str], data: Any) -> None:
    task = WebNLG(delexicalise=True)
    triples = tuple(f"{names[0]} | property | {name}" for name in names[1:])
    spoken = [name.strip('"').replace("_", " ") for name in names]
    text = "Here: " + "; ".join(data.draw(st.permutations(spoken))) + "."
    from data.webnlg import _entry  # an example without a file

    example = task._example("one", _entry("here", "Food", triples, [("good", text)]), "train")
    (target,) = example.targets
    assert not any(name in target for name in spoken)
    assert task.restore(example, target) == text
    for hidden, name in example.substitutions:  # a name stands beside its placeholder once, and then no more
        assert example.prompt.count(f"{hidden} {name}") == example.prompt.count(name) == 1
    assert example.prompt.count("Xqa") == len(names) - 1


def test_a_name_is_hidden_however_it_is_written() -> None:
    letters = {"Adolfo_Suárez_Madrid–Barajas_Airport": "qa", "Madrid": "qb", "Wilfred_R._Cousins,_Jr.": "qc"}
    for text, hidden in {
        "ADOLFO SUAREZ Madrid-Barajas airport, near Madrid.": "Xqa, near Xqb.",
        "Wilfred R Cousins Jr. and Madrid's mayor": "Xqc. and Xqb's mayor",
        "Madridista, pre_Madrid": "Madridista, pre_Madrid",
    }.items():
        assert hide_names(text, letters) == hidden


def test_properties_are_words() -> None:
    triple = ("A", "elevationAboveTheSeaLevel_(in_metres)", "25.0")
    assert linearise([triple]) == "A : elevation above the sea level (in metres) : 25.0"
    assert linearise([("A", "ICAO_Location_Identifier", '"SBCT"')]) == "A : icao location identifier : SBCT"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no xml", "a.xml: not XML"),
        ("<benchmark/>", r"a\.xml has no entries"),
        (entry("Food", ("a | b",), {"text": "good"}), r"a\.xml, entry Id1: expected triples"),
        (entry("Food", ("a | b | ",), {"text": "good"}), "expected triples"),
        (entry("Food", (), {"text": "good"}), "expected triples"),
        (entry("Food", CITY, {}), "it must have a category and texts"),
        (entry("Food", CITY, {" ": "good"}), "it must have a category and texts"),
        (entry("", CITY, {"text": "good"}), "it must have a category and texts"),
    ],
)
def test_a_file_that_is_not_the_challenges_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    folder_with(tmp_path)
    (tmp_path / "train" / "1triples" / "a.xml").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        WebNLG(str(tmp_path)).load("train")
    assert "\n" not in str(caught.value)


def test_a_folder_without_the_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_task("webnlg", path=str(tmp_path / "nowhere")).load("train")
    with pytest.raises(ConfigError, match="it has no XML files in dev/"):
        load_task("webnlg", path=str(tmp_path)).load("validation")
    with pytest.raises(ConfigError, match=r"it has no test/testdata_with_lex\.xml"):
        load_task("webnlg", path=str(tmp_path)).load("test")
    with pytest.raises(ConfigError, match="delexicalise is"):
        load_task("webnlg", path=str(tmp_path), delexicalise=["name"])


def test_the_hubs_form_gives_the_same_examples_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    row = {
        "category": "Artist",
        "modified_triple_sets": {"mtriple_set": [list(CITY)]},
        "lex": {"comment": ["good", "good"], "lid": ["Id1", "Id2"], "text": ["One.", "Two."], "lang": ["", ""]},
    }
    without = {**row, "lex": {"comment": [], "lid": [], "text": [], "lang": []}}

    def load_dataset(repository: str, **options: str) -> list[dict[str, Any]]:
        asked.append({"repository": repository, **options})
        return [row, without, row] if options["split"] == "test" else [{**row, "lex": None}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (example,) = WebNLG().load("test")
    assert (example.references, example.part) == (("One.", "Two."), "unseen")
    assert example.prompt == "Aarhus Airport : city served : Aarhus | Aarhus : leader name : Jacob Bundsgaard\n"
    place = {"data_dir": "webnlg_challenge_2017", "revision": "refs/convert/parquet"}
    assert asked == [{"repository": "webnlg-challenge/web_nlg", "split": "test", **place}]
    with pytest.raises(ConfigError, match="train, row 1: not an entry of WebNLG"):
        WebNLG().load("train")


def test_the_real_data_has_its_known_sizes_and_its_names_come_back(shared_data: Path) -> None:
    task = WebNLG(str(shared_data / "webnlg"), delexicalise=True)
    train, validation, test = (task.load(split) for split in ("train", "validation", "test"))
    assert [len(split) for split in (train, validation, test)] == [6940, 872, 1862]
    assert sum(len(example.references) for example in test) == 4928
    assert sum(example.part == "unseen" for example in test) == 891
    assert len(UNSEEN) == 5
    stated = total = 0
    for example in validation:
        for target, reference in zip(example.targets, example.references, strict=True):
            stated += sum(hidden in target for hidden, _ in example.substitutions)
            total += len(example.substitutions)
            assert "Xq" not in task.restore(example, target)
            assert "Xq" not in reference
    assert stated / total > 0.75
