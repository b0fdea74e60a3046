"""The departures task: reproducible, disjoint splits, and references that state exactly what the prompt states."""

import os
import re
import subprocess
import sys

import pytest

from data.departures import PLACES, TIMES, Departures, split_of
from data.task import Example, Split
from skipdecode.errors import ConfigError

TRAIN_SIZE = 500  # enough for these tests
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
STOP_KEYS = {"train": "platform", "bus": "stop", "ferry": "pier"}
ORDER = ["vehicle", "line", "from", "to", "leaves", "stop", "duration", "price", "status", "wifi", "bicycles"]

# How a text may state a value, written by hand and independent of the grammar under test. Each list of values is
# complete, so that the tests can also check that a text states no other value of the slot.
CLOCK_WORDS = {"7.30": "half past seven", "9.00": "nine o'clock", "12.00": "noon"}
LINES = ["Heron", "Copper", "Amber", "Willow", "Orchard", "Beacon", "Indigo", "Juniper"]
PATTERNS: dict[str, dict[str, str]] = {
    "vehicle": {vehicle: rf"\b{vehicle}\b" for vehicle in STOP_KEYS},
    "line": {line: rf"\b{line} Line\b" for line in LINES},
    "from": {place: rf"\b(?:[Ff]rom|leaves?|[Ll]eaving|departs) {place}\b" for place in PLACES},
    "to": {place: rf"\b(?:to|for|reach|reaches) {place}\b|\b{place} (?:train|bus|ferry)\b" for place in PLACES},
    "leaves": {
        time: rf"(?<![\d.]){re.escape(time)}(?!\d)" + (f"|{CLOCK_WORDS[time]}" if time in CLOCK_WORDS else "")
        for time in TIMES
    },
    "stop": {number: rf"\b(?:platform|stop|pier) {number}\b" for number in "12345678"},
    "duration": {
        **{f"{n} minutes": rf"\b{n} minutes\b|\b{n}-minute\b" for n in (20, 35, 45, 80, 90)},
        "1 hour": r"\b(?:1|an) hour\b|\b1-hour\b",
        "2 hours": r"\b(?:2|two) hours\b|\b2-hour\b",
        "3 hours": r"\b(?:3|three) hours\b|\b3-hour\b",
    },
    "price": {
        "3 euros": r"\b(?:3|three) euros\b",
        "5 euros": r"\b(?:5|five) euros\b",
        **{f"{n} euros": rf"\b{n} euros\b" for n in (8, 11, 15, 20)},
    },
    "status": {
        "on time": r"\bon (?:time|schedule)\b|\b[Nn]o delay\b",
        "delayed": r"\bdelayed\b|\brunning late\b|\ba delay\b",
        "cancelled": r"\bcancelled\b",
    },
    "wifi": {"no": r"\b(?:no|not have|neither) wifi\b", "yes": r"\b(?:has|offers|is|with|use the) wifi\b"},
    "bicycles": {
        "no": r"\b(?:no|nor) room for bicycles\b|[Bb]icycles are not allowed|not carry bicycles|cannot bring bicycles",
        "yes": r"(?<!no )(?<!nor )\broom for bicycles\b|[Bb]icycles are welcome|carries bicycles|can bring bicycles",
    },
}


def parse(prompt: str) -> dict[str, str]:
    slots = dict(part.split(": ") for part in prompt.removesuffix("\n").split(" | "))
    return {"stop" if key in STOP_KEYS.values() else key: value for key, value in slots.items()}


def stated(text: str) -> dict[str, list[str]]:
    """Every slot that a text mentions, with all of its values that the text may state."""
    found = {}
    for slot, values in PATTERNS.items():
        found[slot] = [value for value, pattern in values.items() if re.search(pattern, text)]
    return {slot: values for slot, values in found.items() if values}


@pytest.fixture(scope="module")
def task() -> Departures:
    return Departures(train_size=TRAIN_SIZE)


@pytest.fixture(scope="module")
def splits(task: Departures) -> dict[Split, list[Example]]:
    return {split: task.load(split) for split in SPLITS}


@pytest.fixture(scope="module")
def examples(splits: dict[Split, list[Example]]) -> list[Example]:
    return [example for split in SPLITS for example in splits[split]]


def test_a_process_with_another_hash_seed_generates_the_same_examples(splits: dict[Split, list[Example]]) -> None:
    # Starting Python takes most of the time, so this process is one of the two that are compared.
    script = f"from data.departures import Departures; task = Departures(train_size={TRAIN_SIZE})\n"
    script += "print([task.load(split) for split in ('train', 'validation', 'test')])"
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout
    assert printed.startswith(repr([splits[split] for split in SPLITS]))


def test_a_longer_split_begins_with_the_shorter_one(splits: dict[Split, list[Example]]) -> None:
    for size in (1, 70):
        task = Departures(train_size=size, validation_size=size, test_size=size)
        for split in SPLITS:
            assert task.load(split) == splits[split][:size]


def test_another_seed_gives_other_examples(splits: dict[Split, list[Example]]) -> None:
    other = Departures(seed=1).load("test")
    shared = {example.prompt for example in other} & {example.prompt for example in splits["test"]}
    assert len(shared) < 10


def test_splits_share_no_meaning(splits: dict[Split, list[Example]]) -> None:
    train, validation, test = ({example.prompt for example in splits[split]} for split in SPLITS)
    assert not train & validation | train & test | validation & test
    # Few of the many meanings are drawn, so disjoint splits would be likely by chance: each meaning must belong to its
    # split.
    for split in SPLITS:
        assert {split_of(example.prompt) for example in splits[split]} == {split}


def test_splits_of_different_seeds_share_no_meaning(splits: dict[Split, list[Example]]) -> None:
    for seed in (1, 2):
        train = {example.prompt for example in Departures(seed=seed, train_size=TRAIN_SIZE).load("train")}
        assert train.isdisjoint(example.prompt for example in splits["test"])


def test_a_split_has_the_requested_size_its_number_of_references_and_distinct_meanings() -> None:
    task = Departures()
    for split, size, count in (("train", 3000, 3), ("validation", 200, 6), ("test", 200, 6)):
        loaded = task.load(split)  # type: ignore[arg-type]
        assert len(loaded) == size
        assert [example.id for example in loaded[:13:12]] == [f"departures-{split}-00000", f"departures-{split}-00012"]
        assert {len(example.references) for example in loaded} == {count}
        assert len({example.prompt for example in loaded}) == size
        assert all(example.targets == example.references for example in loaded)


def test_references_of_one_meaning_differ_from_each_other(examples: list[Example]) -> None:
    for example in examples:
        assert len(set(example.references)) == len(example.references), example


def test_prompts_end_with_a_newline_and_list_their_slots_in_a_fixed_order(examples: list[Example]) -> None:
    for example in examples:
        assert example.prompt.endswith("\n")
        assert example.prompt.count("\n") == 1
        slots = parse(example.prompt)
        assert 4 <= len(slots) <= 8
        assert list(slots) == [slot for slot in ORDER if slot in slots]
        assert {"vehicle", "to", "leaves"} <= slots.keys()
        assert slots.get("from") != slots["to"]
        assert all(value in PATTERNS[slot] for slot, value in slots.items())
        assert "stop" not in slots or f"| {STOP_KEYS[slots['vehicle']]}: " in example.prompt


def test_every_value_of_every_slot_occurs_in_the_training_split(splits: dict[Split, list[Example]]) -> None:
    for slot, values in PATTERNS.items():
        assert {parse(example.prompt).get(slot) for example in splits["train"]} - {None} == set(values)


def test_every_reference_states_exactly_the_slots_of_its_prompt(examples: list[Example]) -> None:
    for example in examples:
        wanted = {slot: [value] for slot, value in parse(example.prompt).items()}
        for text in example.references:
            assert stated(text) == wanted, (example.id, text)


@pytest.mark.parametrize("slot", ["line", "from", "to", "leaves", "stop", "duration", "price"])
def test_the_reference_check_detects_a_replaced_value(slot: str, examples: list[Example]) -> None:
    tried = 0
    for example in examples[::10]:
        slots = parse(example.prompt)
        for text in example.references if slot in slots else ():
            value, other = slots[slot], next(other for other in PATTERNS[slot] if other not in slots.values())
            words = {"line": "{} Line", "stop": STOP_KEYS[slots["vehicle"]] + " {}"}.get(slot, "{}")
            replaced = text.replace(words.format(value), words.format(other))
            if replaced != text:  # the value may be written in words
                assert stated(replaced)[slot] == [other]
                tried += 1
    assert tried > 30


def test_references_are_one_to_three_well_formed_sentences(examples: list[Example]) -> None:
    for example in examples:
        for text in example.references:
            assert re.fullmatch(r"[A-Z][^{}\[\]\n]*[a-z\d]\.", text), text
            assert 1 <= len(re.findall(r"\.(?= [A-Z]|$)", text)) <= 3, text
            assert len(text) <= 140, text
            assert not re.search(r"  | [.,:]|,,|\. [a-z]|\b(\w+) \1\b", text), text


def test_articles_agree_with_what_follows(examples: list[Example]) -> None:
    texts = [text for example in examples for text in example.references]
    following = {(article.lower(), word) for text in texts for article, word in re.findall(r"\b([Aa]n?) (\S+)", text)}
    vowel = {word for article, word in following if article == "an"}
    assert vowel >= {"Amber", "Orchard", "Indigo", "80-minute", "hour"}
    assert all(re.match(r"[AEIOaeio8]|hour", word) for word in vowel)
    assert not [word for article, word in following if article == "a" and re.match(r"[AEIOUaeiou8]|hour", word)]


def test_references_of_a_cancelled_trip_state_only_its_status(examples: list[Example]) -> None:
    cancelled = [parse(e.prompt) for e in examples if "status: cancelled" in e.prompt]
    assert len(cancelled) > 30
    for slots in cancelled:
        assert not slots.keys() & {"duration", "price", "wifi", "bicycles"}


def test_an_unknown_split_is_refused_with_the_nearest_one(task: Departures) -> None:
    with pytest.raises(ConfigError, match=r"unknown split 'tests': did you mean 'test'\?"):
        task.load("tests")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", "0"),
        ("train_size", 0),
        ("train_size", True),
        ("train_size", 2.5),
        ("validation_size", 10_001),
        ("test_size", -3),
    ],
)
def test_the_error_for_a_bad_argument_names_the_field_the_value_and_the_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is {value!r}: it must be an integer from \d+ to \d+"):
        Departures(**{field: value})  # type: ignore[arg-type]
