"""The slot error rate of ViGGO's dialogue acts and WebNLG's triples, and the detection of the task."""

import random
from pathlib import Path

import pytest

from data import load_task
from data.placeholders import placeholder
from data.slots import SlotErrors
from data.viggo import parse_act
from data.webnlg import letters_of, read_triples
from eval.score.slot_errors import slot_error_rate
from eval.score.slots_viggo import act_errors
from eval.score.slots_webnlg import name_errors

ACT = (
    "inform(name[Portal 2], release_year[2011], developer[Valve Corporation], esrb[E 10+ (for Everyone 10 and Older)], "
    "genres[platformer, puzzle, shooter], player_perspective[first person], has_multiplayer[yes], "
    "platforms[PlayStation, Xbox, PC], available_on_steam[yes], has_linux_release[no])"
)
TOLD = (
    "Portal 2 is a first person puzzle platformer and shooter of 2011 by Valve Corporation, rated E 10+. It is out on "
    "PlayStation, Xbox and PC. It has multiplayer and is on Steam. It does not have a Linux release."
)
CITY = "Aarhus_Airport | cityServed | Aarhus\nAarhus | leaderName | Jacob_Bundsgaard"


def found(text: str, act: str = ACT) -> dict[str, tuple[str, ...]]:
    errors = act_errors(text, parse_act(act))
    return {kind: slots for kind in ("missing", "wrong", "added") if (slots := getattr(errors, kind))}


def test_an_output_that_states_its_dialogue_act_has_no_errors() -> None:
    assert found(TOLD) == {}
    assert slot_error_rate([TOLD], [ACT]).value == 0


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        ("name", "Portal 2"),
        ("release_year", " of 2011"),
        ("developer", "Valve Corporation"),
        ("esrb", ", rated E 10+"),
        ("genres", " and shooter"),
        ("player_perspective", "first person "),
        ("platforms", ", Xbox"),
        ("has_multiplayer", "It has multiplayer and is on Steam. "),
        ("available_on_steam", " and is on Steam"),
        ("has_linux_release", " It does not have a Linux release."),
    ],
)
def test_an_unstated_slot_of_a_dialogue_act_counts_as_missing(slot: str, words: str) -> None:
    assert TOLD.count(words) == 1
    assert slot in found(TOLD.replace(words, ""))["missing"]


@pytest.mark.parametrize(
    ("words", "others", "error"),
    [
        ("has multiplayer", "has no multiplayer", {"wrong": ("has_multiplayer",)}),
        ("has multiplayer", "is single-player only", {"wrong": ("has_multiplayer",)}),
        ("is on Steam", "isn't on Steam", {"wrong": ("available_on_steam",)}),
        ("It does not have a Linux release", "It has a Linux release", {"wrong": ("has_linux_release",)}),
        ("It does not have a Linux release", "Linux is not supported", {}),
        ("It does not have a Linux release", "It has no Mac or Linux release", {"added": ("has_mac_release",)}),
        ("PlayStation, Xbox and PC", "Nintendo Switch, PlayStation, Xbox and PC", {"added": ("platforms",)}),
        ("first person", "Xname first person", {"added": ("name",)}),
    ],
)
def test_another_value_in_a_dialogue_act_counts_as_wrong_or_added(
    words: str, others: str, error: dict[str, tuple[str, ...]]
) -> None:
    assert TOLD.count(words) == 1
    assert found(TOLD.replace(words, others)) == error


def test_the_names_of_a_game_and_its_developer_do_not_state_other_slots() -> None:
    act = "suggest(name[The Room Linux PC 1994], developer[Nintendo EAD])"
    assert found("Have you played The Room Linux PC 1994 by Nintendo EAD?", act) == {}
    added = {"added": ("has_linux_release",)}
    assert found("Have you played The Room Linux PC 1994 by Nintendo EAD on Linux?", act) == added


def test_a_requested_slot_does_not_need_a_value() -> None:
    assert found("Which platform do you like?", "request_attribute(platforms[])") == {}
    assert found("Do you hate Linux games?", "verify_attribute(has_linux_release[yes])") == {}
    missing = {"missing": ("has_linux_release",)}
    assert found("Do you hate games?", "verify_attribute(has_linux_release[yes])") == missing


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("Aarhus_Airport", "The airport of Aarhus", True),
        ("Aarhus", "The airport of Århus", False),
        ("Aarhus", "The airport of AARHUS.", True),
        ("Adolfo_Suárez_Madrid–Barajas_Airport", "Adolfo Suarez Madrid-Barajas", True),
        ("Buzz_Aldrin_(astronaut)", "Buzz Aldrin", True),
        ("Buzz_Aldrin_(astronaut)", "an astronaut", False),
        ("N._R._Pogson", "discovered by N.R. Pogson", True),
        ("N._R._Pogson", "discovered by N. R. Peters", False),
        ("Italy", "an Italian dish", True),
        ("Mexico", "a Mexican dish", True),
        ("Java", "in Japan", False),
        ("United_States", "the U.S. capital", True),
        ("United_States", "a united front of us", True),  # half of its words: the matching is lenient
        ("University_of_the_West", "of the university hospital", True),
        ("University_of_the_West", "of the house", False),
        ("1982-07-23", "born on 23 July 1982", True),
        ("1982-07-23", "born on 7/23/1982", True),
        ("1982-07-23", "born on July 23,1982", True),
        ("B.M._Reddy", "led by B.M.Reddy", True),
        ("1982-07-23", "born on 23 May 1982", False),
        ("1982-07-23", "born in July", False),
        ("25000.0", "25,000 students", True),
        ("3800.0 (metres)", "3800 metres long", True),
        ("3800.0 (metres)", "2800 metres long", False),
        ("560", "5600 pages", False),
        ('"SBCT"', "its code is SBCT", True),
    ],
)
def test_a_name_counts_as_stated_with_at_least_half_of_its_words(name: str, text: str, named: bool) -> None:
    assert name_errors(text, [("x", "property", name)]).missing == (("x",) if named else ("x", name))


def test_each_name_in_a_set_of_triples_counts_once() -> None:
    told = "Aarhus Airport serves Aarhus, led by Jacob Bundsgaard."
    assert slot_error_rate([told], [CITY]).value == 0
    assert slot_error_rate([told.replace("Jacob Bundsgaard", "him")], [CITY]).value == pytest.approx(100 / 3)
    triples = read_triples(CITY)
    assert triples is not None
    left = name_errors(told.replace("led by", "Xqd Xqd led by"), triples)
    assert (left.slots, left.missing, left.added) == (3, (), ("Xqd",))


def test_a_negation_extends_past_an_object_pronoun() -> None:
    def steam(text: str) -> SlotErrors:
        return act_errors(text, parse_act("inform(available_on_steam[no])"))

    assert steam("It is out, but you won't find it on Steam.").count == 0
    assert steam("It isn't for Macs and it is on Steam.").wrong == ("available_on_steam",)


@pytest.mark.parametrize("text", ["Assassin’s Creed", "Assassin's Creed", "Caf\u0065\u0301"])
def test_equivalent_characters_match_in_slot_values(text: str) -> None:
    name = "Caf\u00e9" if text.startswith("Caf") else "Assassin's Creed"
    assert slot_error_rate([f"{text} is good."], [f"inform(name[{name}])"]).value == 0
    assert slot_error_rate(["It is good."], [f"inform(name[{name}])"]).value == 100


def test_every_unfilled_placeholder_counts_as_added() -> None:
    triples = [(f"subject {n}", f"property {n}", f"object {n}") for n in range(26)]
    hidden = [placeholder(letters) for letters in letters_of(triples).values()]
    assert name_errors(" ".join(hidden), triples).added == tuple(sorted(hidden))
    assert name_errors("X, Xqaa, Xtm and Xname", triples).added == ()


def test_an_invalid_date_is_matched_as_words() -> None:
    assert name_errors("in December 1999", [("x", "property", "1999-00-05")]).missing == ("x", "1999-00-05")
    assert name_errors("1999-31-05", [("x", "property", "1999-31-05")]).missing == ("x",)


def test_the_notation_of_a_meaning_selects_the_rules_of_its_task() -> None:
    texts = ["Aromi by the river", "Tetris is here", "Aarhus and its airport"]
    meanings = ["name: Aromi | area: riverside | food: Thai", "inform(name[Tetris], release_year[1984])", CITY]
    assert slot_error_rate(texts, meanings).items.tolist() == [[1, 3], [1, 2], [1, 3]]


@pytest.mark.parametrize(("task", "floor", "best"), [("viggo", 0.5, 0.1), ("webnlg", 1.2, 0.4)])
def test_references_have_few_slot_errors_and_texts_of_other_items_many(
    shared_data: Path, task: str, floor: float, best: float
) -> None:
    examples = load_task(task, path=str(shared_data / task)).load("test")
    pairs = [(text, example.meaning) for example in examples for text in example.references]
    assert slot_error_rate(*map(list, zip(*pairs, strict=True))).value < floor
    least = [min(_rates(example.references, example.meaning)) for example in examples]
    assert sum(least) / len(least) < best
    others = random.Random(0).sample(examples, len(examples))
    texts = [example.references[0] for example in others]
    assert slot_error_rate(texts, [example.meaning for example in examples]).value > 90


def _rates(texts: tuple[str, ...], meaning: str) -> list[float]:
    return [slot_error_rate([text], [meaning]).value for text in texts]
