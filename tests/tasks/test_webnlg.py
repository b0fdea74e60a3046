"""The WebNLG task: reading the challenge's XML and the Hub's copy, prompts, delexicalisation, restoring, and errors."""

import re
from itertools import islice
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import load_task
from data.placeholders import put_back
from data.webnlg import UNSEEN, WebNLG, _entry, hide_names, letters_of, linearise, said
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


def test_an_example_has_the_modified_triples_and_good_texts_of_its_entry(tmp_path: Path) -> None:
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
def test_hiding_and_restoring_names_gives_the_original_text(names: list[str], data: Any) -> None:
    task = WebNLG(delexicalise=True)
    triples = tuple(f"{names[0]} | property | {name}" for name in names[1:])
    spoken = [name.strip('"').replace("_", " ") for name in names]
    text = "Here: " + "; ".join(data.draw(st.permutations(spoken))) + "."
    example = task._example("one", _entry("here", "Food", triples, [("good", text)]), "train")
    (target,) = example.targets
    assert not any(name in target for name in spoken)
    assert task.restore(example, target) == text
    assert [name for _, name in example.substitutions] == spoken
    assert len({hidden for hidden, _ in example.substitutions}) == len(names)
    assert example.prompt == " | ".join(f"Xqa : property : {hidden}" for hidden, _ in example.substitutions[1:]) + "\n"


def test_a_name_is_hidden_in_any_spelling_and_before_other_names_short_forms() -> None:
    letters = {"Adolfo_Suárez_Madrid–Barajas_Airport": "qa", "Madrid": "qb", "Wilfred_R._Cousins,_Jr.": "qc"}
    letters |= {"Aarhus,_Denmark": "qd", "Aarhus": "qe", "Denmark": "qf"}
    letters |= {"Bolt_(comicsCharacter)": "qg", "(19255)_1994_VK8": "qh", "Runway_2": "qi"}
    for text, hidden in {
        "ADOLFO SUAREZ Madrid-Barajas airport, near Madrid.": "Xqa, near Xqb.",
        "Wilfred R Cousins Jr. and Madrid's mayor": "Xqc. and Xqb's mayor",
        "Madridista, pre_Madrid": "Madridista, pre_Madrid",
        "Aarhus, Denmark, or Denmark or Aarhus": "Xqd, or Xqf or Xqe",
        # Parentheses are hidden in pairs.
        "Bolt (comicsCharacter) (like (19255) 1994 VK8) has (Runway) 2": "Xqg (like Xqh) has (Runway) 2",
    }.items():
        assert hide_names(text, letters) == hidden


@pytest.mark.parametrize(
    ("name", "text", "hidden"),
    [
        ("1998-05-03", "on May 3, 1998; on May 3rd 1998; on 3 May 1998; on the 3rd of May, 1998; on 1998-05-03", 5),
        ("1998-13-03", "in 1998-13-03, and in May 1998", 1),
        ("United_States", "in the U.S., the USA, the US, the United States of America, but not in use", 4),
        ("Spanish_language", "the Spanish language; in Spanish; Spaniards", 2),
        ("Bolt_(comicsCharacter)", "Bolt, and Bolt (comicsCharacter), not a bolted one", 2),
        ("45000", "45,000 of 45000, not 145000", 2),
        ("3800.0", "3800.0 or 3800 or 13800", 2),
        ("Austin,_Texas", "Austin is Austin, Texas", 2),
        ("A.C._Milan", "AC Milan, A.C. Milan", 2),
        ("Main_ingredient", "Main ingredients", 1),
        ("(19255)_1994_VK8", "(19255) 1994 VK8, and not 1994", 1),
        ("23rd_Street_(Manhattan)", "23rd Street, and 23rd Street (Manhattan)", 2),
        ('"52.0"(minutes)', "52.0 minutes, and 52.0 (minutes)", 2),
        ("!?", "!?", 0),
    ],
)
def test_common_variants_of_a_name_are_hidden(name: str, text: str, hidden: int) -> None:
    found = hide_names(text, {name: "qa"})
    assert found.count("Xqa") == hidden
    assert put_back(found, [("Xqa", said(name))]).count(said(name)) >= hidden


def test_a_name_that_is_put_back_adds_no_second_full_stop_and_its_article_follows_its_sound() -> None:
    names = [("Xqa", "United States"), ("Xqb", "Italy"), ("Xqc", "Eureka"), ("Xqd", "Japan"), ("Xqe", "D. Wayans, Jr.")]
    assert put_back("a Xqa or an Xqb, an Xqc, an Xqd", names) == "a United States or an Italy, a Eureka, a Japan"
    assert put_back("By Xqe. At Xqb.", names) == "By D. Wayans, Jr. At Italy."


def test_targets_are_the_texts_that_omit_the_fewest_names(tmp_path: Path) -> None:
    texts = {"Aarhus Airport serves Aarhus, led by Jacob Bundsgaard.": "good", "It serves Aarhus.": "good"}
    folder = folder_with(tmp_path, entry("Airport", CITY, texts))
    (example,) = WebNLG(str(folder), delexicalise=True).load("train")
    assert example.references == tuple(texts)
    assert len(example.targets) == 1
    assert WebNLG(delexicalise=True).restore(example, example.targets[0]) == next(iter(texts))


@pytest.mark.parametrize(("subjects", "objects"), [(1, 65), (27, 1)])
def test_more_names_than_placeholders_are_refused(subjects: int, objects: int) -> None:
    triples = [(f"s{n % subjects}", "property", f"o{n % objects}") for n in range(max(subjects, objects))]
    with pytest.raises(ConfigError, match=f"an entry has {max(subjects, objects)} .*, at most (64|26) are allowed"):
        letters_of(triples)


def test_with_shuffle_each_text_has_its_own_order_of_triples(tmp_path: Path) -> None:
    triples = tuple(f"Subject_{n % 3} | property_{n} | Object_{n}" for n in range(6))
    texts = {f"Text {n}.": "good" for n in range(8)}
    folder = folder_with(tmp_path, entry("Airport", triples, texts))
    for hidden in (False, True):
        (plain,) = WebNLG(str(folder), hidden).load("train")
        shuffled = WebNLG(str(folder), hidden, shuffle=True).load("train")
        assert [example.targets for example in shuffled] == [(text,) for text in texts]
        assert len({example.id for example in shuffled}) == len({example.prompt for example in shuffled}) == len(texts)
        triples_of = [sorted(example.prompt.strip().split(" | ")) for example in (plain, *shuffled)]
        assert triples_of == triples_of[:1] * len(triples_of)
        assert shuffled == WebNLG(str(folder), hidden, shuffle=True).load("train"), "the same every time"
        assert WebNLG(str(folder), hidden, shuffle=True).load("test") == WebNLG(str(folder), hidden).load("test")


def test_properties_are_written_as_words() -> None:
    triple = ("A", "elevationAboveTheSeaLevel_(in_metres)", "25.0")
    assert linearise([triple]) == "A : elevation above the sea level (in metres) : 25.0"
    assert linearise([("A", "ICAO_Location_Identifier", '"SBCT"')]) == "A : icao location identifier : SBCT"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no xml", "a.xml can.t be read as XML"),
        ('<?xml version="1.0" encoding="none"?><benchmark/>', r"a\.xml can.t be read as XML \(unknown encoding: none"),
        ('<?xml version="1.0" encoding="gb2312"?><benchmark/>', r"a\.xml can.t be read as XML \(multi-byte encodings"),
        ("<benchmark/>", r"a\.xml has no entries"),
        (entry("Food", ("a | b",), {"text": "good"}), r"a\.xml, entry Id1: expected triples"),
        (entry("Food", ("a | b | ",), {"text": "good"}), "expected triples"),
        (entry("Food", (), {"text": "good"}), "expected triples"),
        (entry("Food", CITY, {}), "the category and the texts must not be missing"),
        (entry("Food", CITY, {" ": "good"}), "the category and the texts must not be missing"),
        (entry("", CITY, {"text": "good"}), "the category and the texts must not be missing"),
    ],
)
def test_the_error_names_a_file_that_is_not_the_challenges(tmp_path: Path, content: str, message: str) -> None:
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


def test_the_hubs_copy_gives_the_same_examples_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_real_data_has_its_published_size_and_its_names_are_restored(shared_data: Path) -> None:
    plain = WebNLG(str(shared_data / "webnlg"))
    train, validation, test = (plain.load(split) for split in ("train", "validation", "test"))
    assert [len(split) for split in (train, validation, test)] == [6940, 872, 1862]
    assert sum(len(example.references) for example in test) == 4928
    assert sum(example.part == "unseen" for example in test) == 891
    assert len(UNSEEN) == 5
    task = WebNLG(str(shared_data / "webnlg"), delexicalise=True)
    validation = task.load("validation")
    stated = total = 0
    for example in validation:
        assert 1 <= len(example.targets) <= len(example.references)
        for target in example.targets:
            stated += sum(hidden in target for hidden, _ in example.substitutions)
            total += len(example.substitutions)
            assert not re.search(r"X[q-t][a-z]\b", task.restore(example, target))
    assert stated / total > 0.9
    shuffled = WebNLG(str(shared_data / "webnlg"), delexicalise=True, shuffle=True)
    prompts = [example.prompt for example in islice(shuffled.stream("validation"), 99)]
    assert prompts == [example.prompt for example in validation[:99]]
