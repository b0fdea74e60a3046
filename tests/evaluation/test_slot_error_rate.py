"""The slot error rate of E2E: missing, wrong, repeated and added slots."""

from pathlib import Path

import pytest

from data import load_task
from data.e2e import parse_mr, read_meaning
from data.e2e_slots import VALUES, slot_errors
from eval.score.metric import NotAvailableError
from eval.score.scores import score
from eval.score.slot_errors import slot_error_rate
from skipdecode import ConfigError

FULL = (
    "name[Aromi], eatType[coffee shop], food[Italian], priceRange[cheap], customer rating[5 out of 5], "
    "area[riverside], familyFriendly[yes], near[The Six Bells]"
)
RIGHT = "Aromi is a cheap, kid friendly Italian coffee shop by the river near The Six Bells, rated 5 out of 5."


def errors(text: str, meaning: str = FULL) -> tuple[tuple[str, ...], ...]:
    found = slot_errors(text, parse_mr(meaning))
    assert found.repeated == ()
    return found.missing, found.wrong, found.added


def test_an_output_that_states_every_slot_has_no_errors() -> None:
    assert errors(RIGHT) == ((), (), ())
    assert errors(RIGHT.upper().replace("COFFEE SHOP", "COFFEE-SHOP")) == ((), (), ())


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        ("name", "Aromi"),
        ("eatType", "coffee shop"),
        ("food", "Italian"),
        ("priceRange", "cheap, "),
        ("customer rating", ", rated 5 out of 5"),
        ("area", "by the river"),
        ("familyFriendly", "kid friendly"),
        ("near", "near The Six Bells"),
    ],
)
def test_an_unstated_slot_counts_as_missing(slot: str, words: str) -> None:
    assert errors(RIGHT.replace(words, "")) == ((slot,), (), ())
    assert slot_error_rate([RIGHT.replace(words, "")], [FULL]).value == pytest.approx(100 / 8)


# A phrase for each value; the phrases of other values of the slot are wrong.
SAID = {
    "priceRange": {
        "low": ["cheap", "It is inexpensive", "less than £20", "low prices", "low-priced", "the price range is low"],
        "middle": ["moderately priced", "prices of £20-25", "between £20 and £25", "mid-priced", "average price range"],
        "high": ["expensive", "more than £30", "high prices", "a high price range", "high-priced", "prices are high"],
    },
    "customer rating": {
        "low": ["1 out of 5", "one star", "a low customer rating", "poorly rated", "customers rate it 1 out of 5"],
        "middle": ["3 out of 5", "three stars", "an average customer rating", "the customer rating is average"],
        "high": [
            *("5 out of 5", "5-star", "highly rated", "a high customer rating", "well-rated", "5/5"),
            "five out of five",
        ],
    },
    "area": {"riverside": ["by the river", "in the riverside area"], "city centre": ["in the city centre", "downtown"]},
    "familyFriendly": {
        "yes": ["kid friendly", "children are welcome", "a family place", "not only nice but family-friendly"],
        "no": [
            *("not family-friendly", "no kids", "adults only", "non-family friendly", "isn't suitable for children"),
            *("child-free", "children are not allowed", "it is not a place for families"),
        ],
    },
}


@pytest.mark.parametrize(
    ("slot", "value", "stated", "text"),
    [
        (slot, value, stated, text)
        for slot, values in VALUES.items()
        for value, level in values.items()
        for stated, texts in SAID[slot].items()
        for text in (texts if stated == level else texts[:3])
    ],
)
def test_another_value_counts_as_wrong_but_a_paraphrase_does_not(slot: str, value: str, stated: str, text: str) -> None:
    right = VALUES[slot][value] == stated
    assert errors(f"Aromi, {text}.", f"name[Aromi], {slot}[{value}]") == ((), () if right else (slot,), ())


def test_a_right_value_beside_a_wrong_one_is_wrong() -> None:
    assert errors("Aromi is by the river in the city centre.", "name[Aromi], area[riverside]") == ((), ("area",), ())
    assert errors("Aromi has Italian and Chinese food.", "name[Aromi], food[Italian]") == ((), ("food",), ())


def test_a_slot_outside_the_meaning_counts_as_added() -> None:
    text = "Aromi is a cheap French restaurant by the river. It is not family-friendly and has a low customer rating."
    added = ("food", "priceRange", "customer rating", "area", "familyFriendly")
    assert errors(text, "name[Aromi]") == ((), (), added)
    assert slot_error_rate([text], ["name[Aromi]"]).value == pytest.approx(500)
    assert errors("Aromi serves Xfood food near Xnear.", "name[Aromi]") == ((), (), ("food", "near"))


def test_a_slot_stated_twice_in_the_same_words_counts_as_repeated() -> None:
    meaning = parse_mr(FULL)
    for more in ("cheap", "Italian", "by the river", "near The Six Bells", "rated 5 out of 5", "kid friendly"):
        found = slot_errors(f"{RIGHT} Aromi, a coffee shop, is {more}.", meaning)
        assert (found.missing, found.wrong, found.added, len(found.repeated), found.count) == ((), (), (), 1, 1)
    other_words = "It is inexpensive, loved by families and reviewers: five out of five."
    assert slot_errors(f"{RIGHT} {other_words}", meaning).repeated == ()


def test_the_words_of_names_do_not_state_other_slots() -> None:
    meaning = "name[Raja Indian Cuisine], near[Cheap Kids by the River]"
    assert errors("Raja Indian Cuisine is near Cheap Kids by the River.", meaning) == ((), (), ())


def test_the_slot_error_rate_is_the_sum_of_errors_over_the_sum_of_slots() -> None:
    # 8 slots with one missing and 2 with none: 1 of 10, and not the mean of 1/8 and 0.
    texts, meanings = [RIGHT.replace("cheap, ", ""), "Aromi by the river"], [FULL, "name[Aromi], area[riverside]"]
    assert slot_error_rate(texts, meanings).value == pytest.approx(10)


def test_a_meaning_is_parsed_from_a_prompt_without_placeholders() -> None:
    meaning = parse_mr("name[Aromi], area[riverside]")
    assert read_meaning("area: riverside | name: Aromi\n") == read_meaning(" name[Aromi], area[riverside]") == meaning
    with pytest.raises(ConfigError, match="the prompt has the placeholder Xname instead of the value of name"):
        read_meaning("name: Xname | area: riverside\n")
    for text in ("", "Describe Aromi.", "name: Aromi | colour: red", "TITLE: tea"):
        with pytest.raises(ConfigError):
            read_meaning(text)
    with pytest.raises(NotAvailableError, match="item 2 has no meaning representation"):
        slot_error_rate(["a", "b"], ["name[Aromi]", "Describe Aromi."])
    assert "item 1" in score(["a"], [["a"]], ["slot_error_rate"], meanings=["?"]).unavailable["slot_error_rate"]
    assert "needs meaning representations" in score(["a"], [["a"]], ["slot_error_rate"]).unavailable["slot_error_rate"]


def test_examples_have_meanings_without_placeholders(tmp_path: Path) -> None:
    (tmp_path / "testset_w_refs.csv").write_text('mr,ref\n"near[The Mill], name[Aromi]",Aromi.\n', encoding="utf-8")
    (tmp_path / "devset.csv").touch()
    (example,) = load_task("e2e", path=str(tmp_path), delexicalise=["name", "near"]).load("test")
    assert example.meaning == "name[Aromi], near[The Mill]"


def test_references_by_people_contradict_few_meanings(shared_data: Path) -> None:
    examples = load_task("e2e", path=str(shared_data / "e2e")).load("test")
    found = [slot_errors(text, parse_mr(example.meaning)) for example in examples for text in example.references]
    slots = sum(errors.slots for errors in found)
    assert sum(len(errors.wrong) for errors in found) / slots < 0.02
    assert sum(len(errors.added) + len(errors.repeated) for errors in found) / slots < 0.005
