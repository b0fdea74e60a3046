"""The E2E NLG task: reading, delexicalisation, restoring, and errors."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import load_task
from data.e2e import E2E, parse_mr
from data.e2e_slots import SLOTS
from data.placeholders import hide
from skipdecode import ConfigError

HEADER = "mr,ref\n"


def folder_with(tmp_path: Path, train: str, test: str | None = None) -> E2E:
    (tmp_path / "devset.csv").write_text(train, encoding="utf-8")
    (tmp_path / "testset_w_refs.csv").write_text(test or train, encoding="utf-8")
    return E2E(str(tmp_path), delexicalise=["name", "near", "eatType", "food"])


@given(st.dictionaries(st.sampled_from(SLOTS), st.text("abc £-é'", min_size=1).filter(str.strip), min_size=1))
def test_a_meaning_representation_parses_to_its_slots_in_a_fixed_order(slots: dict[str, str]) -> None:
    text = ", ".join(f"{slot}[{value}]" for slot, value in slots.items())
    parsed = parse_mr(text)
    assert parsed == {slot: value.strip() for slot, value in slots.items()}
    assert list(parsed) == [slot for slot in SLOTS if slot in slots]


def test_rows_with_the_same_mr_form_one_example_with_all_references(tmp_path: Path) -> None:
    texts = ["Aromi is an Italian pub near The Mill.", "Near the mill there is a pub: Aromi. Italian."]
    texts += ["Aromi is a bar near The Mill with pasta."]
    rows = "".join(f'"name[Aromi], eatType[pub], food[Italian], near[The Mill]","{text}"\n' for text in texts)
    task = folder_with(tmp_path, HEADER + rows + '"name[Zizzi], area[riverside]","Zizzi is by the river."\n')
    first, second = task.load("test")
    assert (first.id, second.id) == ("e2e-test-0", "e2e-test-1")
    assert first.prompt == "name: Xname | eatType: XeatType | food: Xfood | near: Xnear\n"
    assert first.references == tuple(texts)
    # The third text has other words for two slots, so it is a reference but not a target.
    assert first.targets == ("Xname is an Xfood XeatType near Xnear.", "Near Xnear there is a XeatType: Xname. Xfood.")
    assert second.prompt == "name: Xname | area: riverside\n"


def test_rows_with_the_same_mr_form_one_example_in_any_order_of_slots(tmp_path: Path) -> None:
    rows = (
        '"name[Aromi], area[riverside]","Aromi is by the river."\n'
        '"name[Zizzi], area[riverside]","Zizzi is by the river."\n'
        '"area[riverside],  name[Aromi]","By the river is Aromi."\n'
    )
    folder_with(tmp_path, HEADER + rows)
    held_out = E2E(str(tmp_path), holdout=1)
    (held,), (trained,) = held_out.load("validation"), held_out.load("train")
    assert held.references == ("Aromi is by the river.", "By the river is Aromi.")
    assert trained.references == ("Zizzi is by the river.",)


def test_restoring_replaces_placeholders_and_corrects_articles_and_capitals(tmp_path: Path) -> None:
    rows = '"name[aromi], eatType[pub], food[Italian], near[The Mill]","aromi Italian pub The Mill"\n'
    (example,) = folder_with(tmp_path, HEADER + rows).load("test")
    task = E2E(str(tmp_path))
    assert task.restore(example, " Xname is a Xfood XeatType. a XeatType near Xnear! ") == (
        "Aromi is an Italian pub. A pub near The Mill!"
    )
    fast = '"name[Aromi], food[Fast food]","Aromi Fast food"\n'
    (example,) = folder_with(tmp_path, HEADER + fast).load("test")
    assert task.restore(example, "Xname serves Xfood food. It has an Xfood menu.") == (
        "Aromi serves Fast food. It has a Fast food menu."
    )


def test_a_value_is_replaced_whatever_character_it_begins_and_ends_with() -> None:
    values = {"priceRange": "£20-25", "name": "Aromi (old)"}
    assert hide("Aromi (old) is £20-25.", values) == "Xname is XpriceRange."
    assert hide("Aromi (old)er is £20-250.", values) == "Aromi (old)er is £20-250."


def test_without_delexicalisation_prompts_and_targets_have_no_placeholders(tmp_path: Path) -> None:
    (tmp_path / "devset.csv").write_text(HEADER + '"area[riverside], name[Aromi]",Aromi.\n', encoding="utf-8")
    (example,) = E2E(str(tmp_path)).load("train")
    assert example.prompt == "name: Aromi | area: riverside\n"
    assert example.targets == example.references == ("Aromi.",)


def test_held_out_examples_form_the_validation_split_and_are_not_trained_on(tmp_path: Path) -> None:
    rows = "".join(f'"name[Place {n}]",text {n}\n"name[Place {n}]",again {n}\n' for n in range(10))
    (tmp_path / "devset.csv").write_text(HEADER + rows, encoding="utf-8")
    everything = [example.references for example in E2E(str(tmp_path)).load("train")]
    task = E2E(str(tmp_path), holdout=3)
    trained, held = ([example.references for example in task.load(split)] for split in ("train", "validation"))
    assert held == [everything[n] for n in (0, 3, 6)]
    assert trained == [references for references in everything if references not in held]
    for wrong, message in ((-1, "it must be an integer of 0 or more"), (10, "devset.csv has 10")):
        with pytest.raises(ConfigError, match=message):
            E2E(str(tmp_path), holdout=wrong).load("train")


def test_with_trainset_csv_the_devset_is_the_validation_split(tmp_path: Path) -> None:
    task = folder_with(tmp_path, HEADER + '"name[Aromi]",dev\n', HEADER + '"name[Aromi]",test\n')
    assert task.load("train")[0].references == ("dev",)
    with pytest.raises(ConfigError, match=r"needs trainset\.csv"):
        task.load("validation")
    (tmp_path / "trainset.csv").write_text(HEADER + '"name[Aromi]",train\n', encoding="utf-8")
    texts = [task.load(split)[0].references[0] for split in ("train", "validation", "test")]
    assert texts == ["train", "dev", "test"]
    with pytest.raises(ConfigError, match="split 'tset'"):
        task.load("tset")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must name the columns mr and ref"),
        ("meaning,text\na,b\n", "must name the columns mr and ref"),
        (HEADER, "has no rows"),
        (HEADER + '"name[A]",ok\n,empty\n', "line 3: mr and ref must not be empty"),
        (HEADER + '"name[A]",\n', "line 2: mr and ref must not be empty"),
        (HEADER + '"name[A]"\n', "line 2: expected 2 fields"),
        (HEADER + '"name[A]",a, b\n', "line 2: expected 2 fields"),
        (HEADER + '"name(A)",text\n', "line 2: not a meaning representation"),
        (HEADER + '"nmae[A]",text\n', "line 2: not a meaning representation"),
        (HEADER + '"name[A], name[B]",text\n', "line 2: not a meaning representation"),
        (HEADER + '"name[A]","no end\n', "can't be read as CSV"),
    ],
)
def test_the_error_for_an_empty_or_malformed_row_names_the_file_and_the_line(
    tmp_path: Path, content: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        folder_with(tmp_path, content).load("train")
    assert "devset.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "devset.csv").write_bytes(HEADER.encode() + b'"name[Caf\xe9]",text\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        E2E(str(tmp_path)).load("train")


def test_unknown_tasks_options_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown task 'e2ee': did you mean 'e2e'"):
        load_task("e2ee")
    with pytest.raises(ConfigError, match=r"task 'e2e'.*colour"):
        load_task("e2e", colour="red")
    with pytest.raises(ConfigError, match="did you mean 'name'"):
        load_task("e2e", delexicalise=["nme"])
    with pytest.raises(ConfigError, match="no such folder"):
        load_task("e2e", path=str(tmp_path / "nowhere")).load("train")
    with pytest.raises(ConfigError, match=r"it has no devset\.csv"):
        load_task("e2e", path=str(tmp_path)).load("train")
    (tmp_path / "devset.csv").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        load_task("e2e", path=str(tmp_path)).load("train")


def test_the_real_data_has_its_published_size_and_restores_exactly(shared_data: Path) -> None:
    task = E2E(str(shared_data / "e2e"), delexicalise=["name", "near", "eatType", "food"])
    train, test = task.load("train"), task.load("test")
    assert (len(train), sum(len(e.references) for e in train)) == (547, 4672)
    assert (len(test), sum(len(e.references) for e in test)) == (630, 4693)
    assert all("Xname" in e.prompt and dict(e.substitutions)["Xname"] for e in test)
    # A restored target equals its reference, except for capitals, spaces at the ends and a/an.
    same = total = 0
    for example in train:
        restored = {task.restore(example, t).lower() for t in example.targets}
        same += len(restored & {r.strip().lower() for r in example.references})
        total += len(restored)
    assert same / total > 0.97


def test_without_a_folder_the_hubs_columns_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def load_dataset(repository: str, revision: str, split: str) -> list[dict[str, str]]:
        asked.append({"repository": repository, "revision": revision, "split": split})
        if split == "test":
            raise ConnectionError("no network")
        texts = ("Aromi.", "It is Aromi.")
        return [{"meaning_representation": "name[Aromi]", "human_reference": text} for text in texts]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (example,) = E2E().load("validation")
    assert example.references == ("Aromi.", "It is Aromi.")
    # See the data set's page on the Hub; scripts are no longer supported, so the converted files are read.
    expected = {"repository": "tuetschek/e2e_nlg", "revision": "refs/convert/parquet", "split": "validation"}
    assert asked == [expected]
    with pytest.raises(ConfigError, match=r"ConnectionError.*data\.path=FOLDER"):
        E2E().load("test")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mr": "name[Aromi]"}, "no column 'meaning_representation', only mr"),
        ({"meaning_representation": "name[Aromi]", "human_reference": None}, "human_reference must not be empty"),
    ],
)
def test_a_bad_row_of_the_hub_is_named(values: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda repository, **options: [values])
    with pytest.raises(ConfigError, match=f"tuetschek/e2e_nlg, train, row 1: {message}"):
        E2E().load("train")


FACTS = {
    "priceRange": ("more than £30", ["over £30", "expensive", "a high price range", "costs a lot"]),
    "customer rating": ("3 out of 5", ["3 out of 5", "three stars", "an average customer rating", "well rated"]),
    "area": ("riverside", ["by the river", "in the city centre", "in the center of town"]),
    "familyFriendly": ("no", ["not family-friendly", "no kids", "adults only", "unsuitable for children"]),
}


@pytest.mark.parametrize("slot", sorted(FACTS))
def test_faithful_training_excludes_references_that_omit_a_fact(slot: str, tmp_path: Path) -> None:
    value, wordings = FACTS[slot]
    texts = [f"Aromi, {wording}, is a pub." for wording in wordings]
    rows = "".join(f'"name[Aromi], eatType[pub], {slot}[{value}]","{text}"\n' for text in ["Aromi is a pub.", *texts])
    folder_with(tmp_path, HEADER + rows)
    for faithful, left in ((True, texts), (False, ["Aromi is a pub.", *texts])):
        (example,) = E2E(str(tmp_path), delexicalise=["name"], faithful=faithful).load("train")
        assert list(example.targets) == [text.replace("Aromi", "Xname") for text in left]
        assert len(example.references) == len(texts) + 1  # references for scoring stay complete


def test_if_every_reference_omits_facts_those_with_the_fewest_omissions_are_trained_on(tmp_path: Path) -> None:
    texts = ("Aromi.", "Kids love Aromi.", "By the river: Aromi.")
    rows = "".join(f'"name[Aromi], area[riverside], familyFriendly[yes]","{text}"\n' for text in texts)
    folder_with(tmp_path, HEADER + rows)
    (example,) = E2E(str(tmp_path), faithful=True).load("train")
    assert example.targets == texts[1:]


ERRONEOUS = {
    "missing": "Aromi is a cheap pub by the river.",
    "wrong": "Aromi is an expensive Italian pub by the river.",
    "added": "Aromi is a cheap Italian pub by the river, good for families.",
    "repeated": "Aromi is a cheap, cheap Italian pub by the river.",
}


@pytest.mark.parametrize("hidden", [[], ["name"]])
def test_clean_training_excludes_references_with_any_kind_of_slot_error(hidden: list[str], tmp_path: Path) -> None:
    clean = ["A cheap Italian pub, Aromi, is by the river.", "Riverside pub Aromi is cheap and serves Italian food."]
    erroneous = [*ERRONEOUS.values(), "Aromi is an expensive pub."]  # the last has three errors
    row = '"name[Aromi], eatType[pub], food[Italian], priceRange[cheap], area[riverside]","{}"\n'
    folder_with(tmp_path, HEADER + "".join(map(row.format, [*erroneous, *clean])))
    (example,) = E2E(str(tmp_path), hidden, clean=True).load("train")
    assert list(example.targets) == [t.replace("Aromi", "Xname") if hidden else t for t in clean]
    assert example.references == (*erroneous, *clean)
    folder_with(tmp_path, HEADER + "".join(map(row.format, erroneous)))
    (example,) = E2E(str(tmp_path), clean=True, concise=True).load("train")
    assert example.targets == (ERRONEOUS["missing"], ERRONEOUS["wrong"])  # the shorter two of those with one error


def test_concise_training_uses_the_shorter_half_of_the_faithful_references(tmp_path: Path) -> None:
    texts = ["Aromi.", "By the river it is, Aromi.", "Aromi by the river.", "Riverside Aromi.", "The river has Aromi."]
    rows = "".join(f'"name[Aromi], area[riverside]","{text}"\n' for text in texts)
    folder_with(tmp_path, HEADER + rows)
    options = [{"faithful": True}, {"concise": True}, {"faithful": True, "concise": True}]
    faithful, short, both = (E2E(str(tmp_path), **each).load("train")[0] for each in options)
    assert faithful.targets == tuple(texts[1:])
    assert short.targets == (texts[0], texts[2], texts[3])
    assert both.targets == (texts[2], texts[3])
    assert both.references == tuple(texts)


def test_one_reference_in_six_of_the_real_data_omits_a_fact(shared_data: Path) -> None:
    hidden = ["name", "near", "eatType", "food"]
    every, faithful = (E2E(str(shared_data / "e2e"), hidden, faithful=only).load("train") for only in (False, True))
    counts = [sum(len(example.targets) for example in examples) for examples in (every, faithful)]
    assert counts[1] / counts[0] == pytest.approx(5 / 6, abs=0.02)


@pytest.mark.parametrize(
    ("task", "option", "value"),
    [
        ("e2e", "faithful", "maybe"),
        ("e2e", "clean", "maybe"),
        ("e2e", "concise", "maybe"),
        ("e2e", "delexicalise", "name"),
        ("e2e", "delexicalise", ["name", "name"]),
        ("e2e", "holdout", True),
        ("e2e", "path", ""),
        ("tldr", "holdout", "ten"),
        ("text", "instruction", ["TL;DR:"]),
        ("text", "prompt_column", 3),
        ("departures", "seed", 1.5),
    ],
)
def test_the_error_for_an_option_of_the_wrong_type_names_it(task: str, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{option} is ") as caught:
        load_task(task, **{option: value})
    assert "\n" not in str(caught.value)
