"""A task that needs no download: announcements of departing trains, buses and ferries, generated from templates."""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator
from typing import ClassVar

from data.task import Example, Split, Task, check_split
from skipdecode.errors import ConfigError

Meaning = dict[str, str]  # slot to value, in the order of VALUES

PLACES = (
    *("Larkhaven", "Quillport", "Brackenholt", "Dunmarrow", "Ottermouth", "Thistlemere", "Pinefold", "Gullhythe"),
    *("Coldharrow", "Merrowdale", "Hazelquay", "Ivorstead", "Wrenlow", "Oakrivet", "Saltfern", "Elmscar"),
)
TIMES = (
    *("6.15", "6.50", "7.30", "8.05", "8.45", "9.00", "9.40", "10.20", "11.15", "11.50", "12.00", "12.35"),
    *("13.10", "13.45", "14.30", "15.05", "15.50", "16.20", "17.00", "17.25", "18.40", "19.10", "20.30", "21.55"),
)
STOP_NAMES = {"train": "platform", "bus": "stop", "ferry": "pier"}
TRIPS = {"train": "journey", "bus": "ride", "ferry": "crossing"}
VERBS = {"train": "run", "bus": "run", "ferry": "sail"}
VALUES = {  # the slots in the order of the prompt, each with its possible values
    "vehicle": tuple(STOP_NAMES),
    "line": ("Heron", "Copper", "Amber", "Willow", "Orchard", "Beacon", "Indigo", "Juniper"),
    "from": PLACES,
    "to": PLACES,
    "leaves": TIMES,
    "stop": ("1", "2", "3", "4", "5", "6", "7", "8"),
    "duration": ("20 minutes", "35 minutes", "45 minutes", "1 hour", "80 minutes", "90 minutes", "2 hours", "3 hours"),
    "price": ("3 euros", "5 euros", "8 euros", "11 euros", "15 euros", "20 euros"),
    "status": ("on time", "delayed", "cancelled"),
    "wifi": ("yes", "no"),
    "bicycles": ("yes", "no"),
}
ALWAYS = ("vehicle", "to", "leaves")
OPTIONAL = tuple(slot for slot in VALUES if slot not in ALWAYS)
BEFORE_CANCELLING = ("line", "from", "stop")  # the only optional slots of a cancelled departure
CANCELLED_SHARE = 0.1
SLOT_COUNTS, SLOT_COUNT_WEIGHTS = (4, 5, 6, 7, 8), (10, 20, 25, 25, 20)
REFERENCES = {"train": 3, "validation": 6, "test": 6}
MAX_CHARACTERS = 140  # a longer text is generated again, so that it fits into 64 tokens of a small vocabulary
# Values are written as they are or as spoken: by this table, or with the number as a word.
SPOKEN = {"7.30": "half past seven", "9.00": "nine o'clock", "12.00": "noon", "1 hour": "an hour"}
NUMBERS = {"2": "two", "3": "three", "5": "five"}
# Templates. A template is used only if the example has all of its fields in braces; a part in brackets is kept only if
# the example has the part's fields. {np} is replaced by one of SUBJECTS, {vp} by one or two of PREDICATES.
SUBJECTS = (
    "the {time}[ {line} Line] {vehicle}[ from {from}] to {to}",
    "the {time} {vehicle}[ from {from}] to {to}[ on the {line} Line]",
    "the {time} {to} {vehicle}[ from {from}][ on the {line} Line]",
    "the[ {line} Line] {vehicle} that {leaves}[ {from}] for {to} {at}[ from {stop}]",
)
OPENINGS = (
    *("{np} {vp}",) * 3,  # the most common opening, so it is three times as likely
    "{np}, which {vp}, {vp}",
    "catch {np}",
    "go to {stop} for the {time}[ {line} Line] {vehicle}[ from {from}] to {to}",
    "expect {delay} on {np}",
    "tickets for {np} cost {price}",
    "running {on_time}, {np} {vp}",
    "{bicycles} are welcome on {np}",
    "{no_bicycles} are not allowed on {np}",
    "a[ {line} Line] {vehicle} {leaves}[ {from}] for {to} {at}[ from {stop}]",
    "{at}, a[ {line} Line] {vehicle} {goes}[ from {from}] to {to}[, leaving from {stop}]",
    "from {stop}, a[ {line} Line] {vehicle} {leaves}[ {from}] for {to} {at}",
    "there is a[ {line} Line] {vehicle}[ from {from}] to {to} {at}[ from {stop}][ with {wifi} on board]",
    "you can travel[ from {from}] to {to} by {vehicle} {at}[ for {price}]",
    "for {price}, you can take {np}",
    "to get[ from {from}] to {to}, take the {time}[ {line} Line] {vehicle}[ from {stop}]",
    "if you are going[ from {from}] to {to}, you can catch the {time}[ {line} Line] {vehicle}[ at {stop}]",
    "the {time}[ {line} Line] {vehicle} takes you[ from {from}] to {to} in {duration}[ for {price}]",
    "the[ {line} Line] {vehicle} {leaves} {from} {at} and {reaches} {to} {duration} later",
    "it is a {long} {trip}[ from {from}] to {to} on the {time}[ {line} Line] {vehicle}[, which leaves from {stop}]",
    "leaving[ {from}] {at}[ from {stop}], the[ {line} Line] {vehicle} to {to} {vp}",
)
# Each of these states all facts: a further sentence after "has been cancelled" would contradict it.
CANCELLED = (
    "the {time}[ {line} Line] {vehicle}[ from {from}] to {to}[, due to leave from {stop},] {is_cancelled}",
    "the {time} {to} {vehicle}[ from {from}][ on the {line} Line] {is_cancelled}[ and will not leave from {stop}]",
    "the[ {line} Line] {vehicle} that was due to leave[ {from}] for {to} {at}[ from {stop}] {is_cancelled}",
    "sorry, passengers[ at {stop}]: the {time}[ {line} Line] {vehicle}[ from {from}] to {to} {is_cancelled}",
    "do not wait[ at {stop}] for the {time}[ {line} Line] {vehicle}[ from {from}] to {to}, as it {is_cancelled}",
    "no[ {line} Line] {vehicle} will leave[ {from}] for {to} {at}[ from {stop}], as the service {is_cancelled}",
    "there will be no[ {line} Line] {vehicle}[ from {from}] to {to} {at}[ from {stop}]. The service {is_cancelled}",
    "the {vehicle} to {to} {is_cancelled}. It was due to leave[ {from}] {at}[ from {stop}][ on the {line} Line]",
    "if you are going[ from {from}] to {to}, the {time}[ {line} Line] {vehicle}[ from {stop}] {is_cancelled}",
)
PREDICATES = {
    "line": ("runs on the {line} Line", "is a {line} Line service"),
    "stop": ("leaves from {stop}", "departs from {stop}"),
    "duration": ("takes {duration}", "gets there in {duration}"),
    "price": ("costs {price}",),
    "on_time": ("is {on_time}", "is running {on_time}"),
    "late": ("is {late}",),
    "wifi": ("has {wifi} on board", "offers {wifi}"),
    "no_wifi": ("has no {no_wifi}", "does not have {no_wifi}"),
    "bicycles": ("carries {bicycles}", "has room for {bicycles}"),
    "no_bicycles": ("does not carry {no_bicycles}", "has no room for {no_bicycles}"),
}
SENTENCES = {
    "line": ("this is a {line} Line service",),
    "stop": ("you board at {stop}", "boarding is at {stop}"),
    "duration": ("the {trip} takes {duration}", "the {trip} lasts {duration}"),
    "price": ("tickets cost {price}", "a ticket costs {price}", "the fare is {price}"),
    "on_time": ("there is {no_delay}", "{no_delay} is expected"),
    "late": ("there is {delay}",),
    "wifi": ("there is {wifi} on board", "you can use the {wifi}"),
    "no_wifi": ("there is no {no_wifi} on board", "the {vehicle} has no {no_wifi}"),
    "bicycles": ("{bicycles} are welcome", "you can bring {bicycles}"),
    "no_bicycles": ("{no_bicycles} are not allowed", "you cannot bring {no_bicycles}"),
}
PAIRS = (
    "the {long} {trip} costs {price}",
    "you pay {price} for the {long} {trip}",
    "{subject} has {wifi} and room for {bicycles}",
    "{subject} has {wifi} but no room for {no_bicycles}",
    "{subject} has room for {bicycles} but no {no_wifi}",
    "there is neither {no_wifi} nor room for {no_bicycles}",
)
FACT_OF = {"long": "duration", "delay": "late", "no_delay": "on_time"}
TONE = {"on_time": 1, "wifi": 1, "bicycles": 1, "late": -1, "no_wifi": -1, "no_bicycles": -1}
CHUNK, FIELD = re.compile(r"\[([^\[\]]*)\]"), re.compile(r"\{(\w+)\}")
WANTS_AN = re.compile(r"\b([Aa]) (?=[AEIO8])")  # "an Amber Line train", "an 80-minute ride"
RANK = {fact: rank for rank, fact in enumerate(PREDICATES)}  # the usual order of facts
RANK_JITTER = 5.0  # a fact may come up to this many ranks later


def draw(rng: random.Random) -> Meaning:
    """Draw a meaning representation of 4 to 8 slots, in the order of VALUES."""
    values = {slot: rng.choice(options) for slot, options in VALUES.items()}
    values["from"], values["to"] = rng.sample(PLACES, 2)
    if rng.random() < CANCELLED_SHARE:
        values["status"] = "cancelled"
        chosen = ["status", *rng.sample(BEFORE_CANCELLING, rng.randint(0, 3))]
    else:
        values["status"] = rng.choice(("on time", "delayed"))
        chosen = rng.sample(OPTIONAL, rng.choices(SLOT_COUNTS, SLOT_COUNT_WEIGHTS)[0] - len(ALWAYS))
    return {slot: value for slot, value in values.items() if slot in ALWAYS or slot in chosen}


def linearise(meaning: Meaning) -> str:
    """The prompt, such as "vehicle: ferry | to: Larkhaven | leaves: 9.40 | pier: 3" and a newline."""
    names = {"stop": STOP_NAMES[meaning["vehicle"]]}
    return " | ".join(f"{names.get(slot, slot)}: {value}" for slot, value in meaning.items()) + "\n"


def split_of(prompt: str) -> Split:
    """The split to which a prompt belongs, whatever the seed: 8 in 10 train, 1 validation, 1 test."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def spoken(value: str) -> str:
    number, space, unit = value.partition(" ")
    return SPOKEN.get(value, NUMBERS.get(number, number) + space + unit if space else value)


def choose_words(meaning: Meaning, rng: random.Random) -> dict[str, str]:
    """The words for each template field that a meaning has, one of the alternatives for each."""
    vehicle, status = meaning["vehicle"], meaning.get("status")
    words = {slot: rng.choice((value, spoken(value))) for slot, value in meaning.items()}
    words |= {"time": meaning["leaves"], "at": f"at {words['leaves']}", "trip": rng.choice((TRIPS[vehicle], "trip"))}
    if status == "delayed":  # "leaves at 9.40" would be wrong for a delayed departure
        words |= {"leaves": "is due to leave", "reaches": "reach", "goes": f"is due to {VERBS[vehicle]}"}
        words |= {"late": rng.choice(("delayed", "running late")), "delay": "a delay"}
    else:
        words |= {"leaves": rng.choice(("leaves", "departs")), "reaches": "reaches", "goes": f"{VERBS[vehicle]}s"}
    if status == "on time":
        words |= {"on_time": rng.choice(("on time", "on schedule")), "no_delay": "no delay"}
    if status == "cancelled":
        words["is_cancelled"] = rng.choice(("is cancelled", "has been cancelled"))
    if "stop" in meaning:
        words["stop"] = f"{STOP_NAMES[vehicle]} {meaning['stop']}"
    if "duration" in meaning:
        words["long"] = meaning["duration"].removesuffix("s").replace(" ", "-")
    for slot in ("wifi", "bicycles"):
        if words.pop(slot, None):
            words[slot if meaning[slot] == "yes" else f"no_{slot}"] = slot
    return words


def keep_chunks(template: str, words: dict[str, str]) -> str:
    """Keep each bracketed part of a template if `words` has its fields, and drop it otherwise."""
    return CHUNK.sub(lambda chunk: chunk[1] if words.keys() >= set(FIELD.findall(chunk[1])) else "", template)


def facts_in(template: str) -> list[str]:
    return [FACT_OF.get(field, field) for field in FIELD.findall(template)]


def conjunction(first: str, second: str) -> str:
    return "but" if TONE.get(first, 0) * TONE.get(second, 0) < 0 else "and"


def join_predicates(facts: list[str], rng: random.Random) -> str:
    """Join one to three facts about one subject, with different verbs: not "has no wifi and has no room"."""
    picked: list[str] = []
    for fact in facts:
        verbs = [predicate.split()[0] for predicate in picked]
        fresh = [predicate for predicate in PREDICATES[fact] if predicate.split()[0] not in verbs]
        picked.append(rng.choice(fresh or PREDICATES[fact]))
    *head, last = picked
    word = conjunction(*facts) if len(facts) == 2 else "and"
    return f"{', '.join(head)} {word} {last}" if head else last


def follow_up(facts: list[str], after_vehicle: bool, rng: random.Random) -> str:
    """A template for a sentence with one to three facts; its subject is "it" only after a sentence with the vehicle."""
    subject = rng.choice(("it", "it", "it", "the {vehicle}") if after_vehicle else ("the {vehicle}", "this {vehicle}"))
    pairs = [pair for pair in PAIRS if set(facts) == set(facts_in(pair)) - {"trip", "subject"}]
    if pairs and rng.random() < 0.6:
        return rng.choice(pairs).replace("{subject}", subject)
    if len(facts) == 3 or rng.random() < 0.4:
        return f"{subject} {join_predicates(facts, rng)}"
    first = rng.choice((f"{subject} {rng.choice(PREDICATES[facts[0]])}", *SENTENCES[facts[0]]))
    if len(facts) == 1:
        return first
    fresh = [sentence for sentence in SENTENCES[facts[1]] if sentence.split()[0] != first.split()[0]]
    return f"{first}, {conjunction(*facts)} {rng.choice(fresh or SENTENCES[facts[1]])}"


def compose(opening: str, words: dict[str, str], rng: random.Random) -> str | None:
    """A reference that starts with `opening`, or None where the opening doesn't fit the facts."""
    opening = keep_chunks(opening.replace("{np}", rng.choice(SUBJECTS)), words)
    said = facts_in(opening)
    left = [fact for fact in words if fact in PREDICATES and fact not in said]
    predicates = opening.count("{vp}")
    if not set(FIELD.findall(opening)) - {"vp"} <= words.keys() or len(left) < predicates:
        return None
    left.sort(key=lambda fact: RANK[fact] + rng.uniform(0, RANK_JITTER))
    for remaining in range(predicates, 0, -1):
        both = remaining == 1 and len(left) > 1 and rng.random() < 0.5
        now, left = left[: 1 + both], left[1 + both :]
        opening = opening.replace("{vp}", join_predicates(now, rng), 1)
    sentences = [opening]
    cut = rng.randint(max(0, len(left) - 3), min(len(left), 3))
    for facts in filter(None, (left[:cut], left[cut:])):
        sentences.append(follow_up(facts, "{vehicle}" in sentences[-1], rng))
    texts = [WANTS_AN.sub(r"\1n ", sentence.format_map(words)) for sentence in sentences]
    reference = " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)
    return reference if len(reference) <= MAX_CHARACTERS else None


def write_references(meaning: Meaning, count: int, rng: random.Random) -> tuple[str, ...]:
    """Write `count` different references, with as many different openings as possible."""
    openings = list(CANCELLED if meaning.get("status") == "cancelled" else OPENINGS)
    rng.shuffle(openings)
    references: dict[str, None] = {}  # an ordered set
    for opening in itertools.cycle(openings):
        if text := compose(opening, choose_words(meaning, rng), rng):
            references[text] = None
        if len(references) == count:
            break
    return tuple(references)


class Departures(Task):
    """Departure announcements, generated from a seed.

    An example depends on the seed, its split and its index, but not on the split's size: a longer split begins with the
    shorter one. Raises ConfigError for a seed or a size out of range.
    """

    name: ClassVar[str] = "departures"
    max_prompt_tokens: ClassVar[int] = 96
    max_new_tokens: ClassVar[int] = 64
    horizon: ClassVar[int] = 34

    def __init__(self, seed: int = 0, train_size: int = 3000, validation_size: int = 200, test_size: int = 200) -> None:
        settings = {
            "seed": (seed, 0, 2**32 - 1),
            "train_size": (train_size, 1, 100_000),
            "validation_size": (validation_size, 1, 10_000),
            "test_size": (test_size, 1, 10_000),
        }
        for field, (value, low, high) in settings.items():
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{field} is {value!r}: it must be an integer from {low} to {high}")
        self.seed = seed
        self._sizes = {"train": train_size, "validation": validation_size, "test": test_size}

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split, no meaning twice. Raises ConfigError for a split that doesn't exist."""
        check_split(split)
        prompts: set[str] = set()
        for index in range(self._sizes[split]):
            rng = random.Random(f"{self.seed}:{split}:{index}")
            prompt = ""
            while not prompt or prompt in prompts or split_of(prompt) != split:
                meaning = draw(rng)
                prompt = linearise(meaning)
            prompts.add(prompt)
            references = write_references(meaning, REFERENCES[split], rng)
            yield Example(f"departures-{split}-{index:05d}", prompt, references)
