"""WebNLG 2017: sets of DBpedia triples and texts that state them (Gardent, Shimorina, Narayan, Perez-Beltrachini,
"The WebNLG Challenge: Generating Text from RDF Data", INLG 2017)."""

import calendar
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import ClassVar
from xml.etree import ElementTree
from zlib import crc32

from data.placeholders import capitals, placeholder, put_back
from data.source import check_folder, hub_rows
from data.task import Convention, Example, Split, Task, check_split
from skipdecode.errors import ConfigError

FOLDERS: dict[Split, str] = {"train": "train", "validation": "dev", "test": "test"}
TEST_FILE = "testdata_with_lex.xml"  # another file in the folder repeats the unseen half
# Categories of the test set that don't occur in training.
UNSEEN = frozenset({"Artist", "Athlete", "CelestialBody", "MeanOfTransportation", "Politician"})
# See the page of the data set.
HUB_REPOSITORY, HUB_CONFIGURATION, HUB_REVISION = (
    "webnlg-challenge/web_nlg",
    "webnlg_challenge_2017",
    "refs/convert/parquet",
)

DATE = re.compile(r"(\d{4})-(0[1-9]|1[0-2])-(\d\d)")
LANGUAGE = re.compile(r"\s+language$")
# Names of placeholders, for objects and for subjects that are never an object. No name is a prefix of another.
OBJECTS = tuple(first + second for first in "rst" for second in ascii_lowercase)[:64]
SUBJECTS = tuple(f"q{letter}" for letter in ascii_lowercase)
PLACEHOLDER = re.compile(rf"\b(?:{'|'.join(map(placeholder, SUBJECTS + OBJECTS))})\b")
SHORT_NAMES = {
    "United States": ("United States of America", "U.S.A.", "U.S.", "USA", "US"),
    "United Kingdom": ("U.K.", "UK"),
}

Triple = tuple[str, str, str]


@dataclass(frozen=True)
class Entry:
    """A set of triples, its category, and the texts that state it."""

    category: str
    triples: tuple[Triple, ...]
    texts: tuple[str, ...]


class WebNLG(Task):
    """WebNLG 2017 from a folder with the challenge's XML files, or from the Hub without one.

    A prompt is `subject : property : object | …`, as in LoRA's fine-tuning of GPT-2 (Hu et al., "LoRA", ICLR 2022).
    Underscores and capitals in properties become spaces. Texts that the challenge marks as faulty are omitted.

    Args:
        path: a folder with `train/` and `dev/` (XML files at any depth) and `test/testdata_with_lex.xml`.
        delexicalise: replace each subject and object by a placeholder in prompts and targets, and restore the names in
            predictions. A model trained from scratch can copy a placeholder, but can't write a name that it never saw.
            Only the texts of an entry with the fewest missing names are trained on, because a target without a
            placeholder would teach the model to state facts that it can't see.
        shuffle: train on the triples of each text in a random order, since their order carries no meaning.
    """

    name: ClassVar[str] = "webnlg"
    metrics: ClassVar[tuple[str, ...]] = (
        "bleu",
        "nist",
        "meteor",
        "rouge1",
        "rouge2",
        "rougeL",
        "cider",
        "slot_error_rate",
    )
    convention: ClassVar[Convention] = "webnlg"
    max_prompt_tokens: ClassVar[int] = 256
    max_new_tokens: ClassVar[int] = 128
    horizon: ClassVar[int] = 32

    def __init__(self, path: str | None = None, delexicalise: bool = False, shuffle: bool = False) -> None:
        self.path = Path(path) if path is not None else None
        self.delexicalise = delexicalise
        self.shuffle = shuffle

    def stream(self, split: Split) -> Iterator[Example]:
        """The examples of a split: files in the order of their names, the test set in the challenge's order."""
        check_split(split)
        entries = self._hub_entries(split) if self.path is None else self._local_entries(split)
        for number, entry in enumerate(entries):
            example = self._example(f"{self.name}-{split}-{number}", entry, split)
            if split == "train" and self.shuffle:
                yield from self._shuffled(example, entry)
            else:
                yield example

    def files(self, split: Split) -> tuple[Path, ...]:
        if self.path is None:
            return ()
        check_folder(self.path)
        folder = self.path / FOLDERS[split]
        if split == "test":
            if not (folder / TEST_FILE).is_file():
                raise ConfigError(f"data.path is {str(self.path)!r}: it has no test/{TEST_FILE}")
            return (folder / TEST_FILE,)
        found = tuple(sorted(folder.rglob("*.xml"))) if folder.is_dir() else ()
        if not found:
            raise ConfigError(f"data.path is {str(self.path)!r}: it has no XML files in {FOLDERS[split]}/")
        return found

    def restore(self, example: Example, text: str) -> str:
        """Replace placeholders by their names, correcting a/an and the capitals of sentences."""
        return capitals(put_back(text, example.substitutions)) if example.substitutions else text.strip()

    def _example(self, name: str, entry: Entry, split: Split) -> Example:
        letters = letters_of(entry.triples) if self.delexicalise else {}
        part = ("unseen" if entry.category in UNSEEN else "seen") if split == "test" else ""
        texts = [hide_names(text, letters) for text in entry.texts]
        omitted = [sum(placeholder(letter) not in text for letter in letters.values()) for text in texts]
        return Example(
            id=name,
            prompt=linearise(entry.triples, letters) + "\n",
            references=entry.texts,
            targets=tuple(text for text, count in zip(texts, omitted, strict=True) if count == min(omitted)),
            substitutions=tuple((placeholder(letter), said(name)) for name, letter in letters.items()),
            meaning="\n".join(" | ".join(triple) for triple in entry.triples),
            part=part,
        )

    def _shuffled(self, example: Example, entry: Entry) -> Iterator[Example]:
        """One example for each target, with the triples in a random order."""
        letters = letters_of(entry.triples) if self.delexicalise else {}
        order = Random(example.id)
        for number, target in enumerate(example.targets):
            triples = order.sample(entry.triples, len(entry.triples))
            prompt = linearise(triples, letters) + "\n"
            yield replace(example, id=f"{example.id}-{number}", prompt=prompt, targets=(target,))

    def _local_entries(self, split: Split) -> Iterator[Entry]:
        for file in self.files(split):
            yield from read_entries(file)

    def _hub_entries(self, split: Split) -> Iterator[Entry]:
        """The Hub's entries without duplicates; its test split has the unseen half twice, and entries without texts."""
        known = set()
        for row in hub_rows(HUB_REPOSITORY, split, data_dir=HUB_CONFIGURATION, revision=HUB_REVISION):
            values = row.values
            try:
                triples, texts = values["modified_triple_sets"]["mtriple_set"][0], values["lex"]
                pairs = list(zip(texts["comment"], texts["text"], strict=True))
                entry = _entry(row.where, values["category"], triples, pairs) if pairs else None
            except (KeyError, TypeError, IndexError, ValueError) as error:
                raise ConfigError(f"{row.where}: not an entry of WebNLG ({type(error).__name__}: {error})") from error
            if entry is not None and entry not in known:
                known.add(entry)
                yield entry


def read_entries(file: Path) -> Iterator[Entry]:
    """The entries of one of the challenge's XML files. Raises ConfigError that names the file and the entry."""
    try:
        root = ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:  # the last two: unsupported encodings
        raise ConfigError(f"{file} can't be read as XML ({error})") from error
    entries = list(root.iter("entry"))
    if not entries:
        raise ConfigError(f"{file} has no entries")
    for entry in entries:
        where = f"{file}, entry {entry.get('eid')}"
        triples = [triple.text or "" for triple in entry.findall("modifiedtripleset/mtriple")]
        texts = [(lex.get("comment") or "good", lex.text or "") for lex in entry.findall("lex")]
        yield _entry(where, entry.get("category") or "", triples, texts)


def _entry(where: str, category: str, triples: Sequence[str], texts: Sequence[tuple[str, str]]) -> Entry:
    """Make an entry from triples `subject | property | object` and pairs of the challenge's comment and a text."""
    parted = [_parts(triple) for triple in triples]
    if not parted or None in parted:
        raise ConfigError(f"{where}: expected triples, subject | property | object, got {list(triples)}")
    good = [text.strip() for comment, text in texts if comment == "good"] or [text.strip() for _, text in texts]
    if not category or not good or not all(good):
        raise ConfigError(f"{where}: the category and the texts must not be missing or empty")
    return Entry(category, tuple(filter(None, parted)), tuple(good))


def read_triples(meaning: str) -> tuple[Triple, ...] | None:
    """Parse a meaning in this task's notation, one triple per line; None for another task's meaning.

    >>> read_triples("Aarhus | leaderName | Jacob_Bundsgaard")
    (('Aarhus', 'leaderName', 'Jacob_Bundsgaard'),)
    >>> read_triples("name: Aromi | area: riverside | food: Thai")  # a prompt of E2E
    """
    parted = [_parts(line) for line in meaning.split("\n")]
    found = tuple(triple for triple in parted if triple is not None and ": " not in triple[1])
    return found if len(found) == len(parted) else None


def _parts(triple: str) -> Triple | None:
    parts = [part.strip() for part in triple.split(" | ")]
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 and all(parts) else None


def linearise(triples: Sequence[Triple], letters: dict[str, str] | None = None) -> str:
    """Write triples as a prompt; subjects and objects in `letters` are replaced by their placeholders.

    >>> linearise([("Aarhus_Airport", "cityServed", '"Aarhus, Denmark"')])
    'Aarhus Airport : city served : Aarhus, Denmark'
    >>> linearise([("Bhajji", "country", "India"), ("India", "leaderName", "T._S._Thakur")], {"India": "qa"})
    'Bhajji : country : Xqa | Xqa : leader name : T. S. Thakur'
    """

    def mention(name: str) -> str:
        return placeholder(letters[name]) if letters and name in letters else spoken(name)

    return " | ".join(f"{mention(s)} : {_property(p)} : {mention(o)}" for s, p, o in triples)


def hide_names(text: str, letters: dict[str, str]) -> str:
    """Replace names, and common variants of them, by placeholders; longer names first.

    Capitals, accents and punctuation between the words of a name are ignored.

    >>> hide_names("Adolfo Suarez Madrid-Barajas airport is in Madrid.", {"Adolfo_Suárez_Madrid–Barajas_Airport": "qa"})
    'Xqa is in Madrid.'
    >>> hide_names("It opened on the 3rd of May 1998, in the US.", {"1998-05-03": "qa", "United_States": "qb"})
    'It opened on Xqa, in the Xqb.'
    """
    own: dict[str, str] = {}
    short: dict[str, str] = {}
    for name, letter in letters.items():
        first, *others = ways_to_say(name)
        own.setdefault(first, letter)
        for pattern in others:
            short.setdefault(pattern, letter)
    known = short | own  # a name's own form takes precedence over another name's short form
    plain = folded(text)  # has the text's length, so that positions agree
    for pattern, letter in sorted(known.items(), key=lambda item: len(item[0]), reverse=True):
        pieces, end = [], 0
        for match in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", plain):
            pieces += [text[end : match.start()], placeholder(letter)]
            end = match.end()
        if pieces:
            text = "".join([*pieces, text[end:]])
            plain = folded(text)
    return text


def said(name: str) -> str:
    """The usual form of a name in text: without remarks in parentheses (except units), with dates in words.

    >>> said("Bolt_(comicsCharacter)"), said("62145.3 (square metres)"), said("1998-05-03"), said("Spanish_language")
    ('Bolt', '62145.3 square metres', 'May 3, 1998', 'Spanish')
    >>> said("23rd_Street_(Manhattan)"), said("(19255)_1994_VK8")
    ('23rd Street', '(19255) 1994 VK8')
    """
    whole = spoken(name)
    if date := DATE.fullmatch(whole):
        return f"{calendar.month_name[int(date[2])]} {int(date[3])}, {date[1]}"
    if whole[:1].isdigit() and "_(" not in name:
        return re.sub(r"\(([^)]*)\)", r"\1", whole)
    return re.sub(rf"(?<=\S)\s*\([^)]*\)|{LANGUAGE.pattern}", "", whole) or whole


def ways_to_say(name: str) -> list[str]:
    """Patterns for the common variants of a name, its own form first, matched in lower case without accents."""
    whole, short = spoken(name), said(name)
    called = [short] if short != whole and LANGUAGE.search(whole) else [whole, short]
    called += SHORT_NAMES.get(whole, ())
    if not whole[:1].isdigit():
        called.append(short.split(",")[0])  # "Austin" for "Austin, Texas"
    elif re.fullmatch(r"\d{4,}", whole):
        called.append(f"{int(whole):,}")
    elif re.fullmatch(r"\d+\.0", whole):
        called.append(whole[:-2])
    patterns = [_pattern(folded(each)) for each in called]
    if date := DATE.fullmatch(whole):
        month, day = calendar.month_name[int(date[2])].lower(), rf"{int(date[3])}(?:st|nd|rd|th)?"
        patterns.append(rf"{month}\W+{day}\W+{date[1]}")
        patterns.append(rf"(?:the\W+)?{day}\W+(?:of\W+)?{month}\W+{date[1]}")
    return [pattern for pattern in dict.fromkeys(patterns) if pattern] or [r"(?!)"]  # without words, match nothing


def _pattern(name: str) -> str:
    """A pattern of a name's words, with any punctuation between them, also in the plural; parentheses must balance."""
    words: list[str] = re.findall(r"\w+", name)
    if not words:
        return ""
    joined = (r"\(?" if name.startswith("(") else "") + re.escape(words[0])
    between = r"\W" if ")" in name else r"[^\w)]"
    for before, word in pairwise(words):
        minimum = 0 if min(len(before), len(word)) == 1 else 1  # "A.C." matches "AC" too
        joined += rf"{between}{{{minimum},3}}" + re.escape(word)
    return joined + ("s?" if words[-1].isalpha() else "") + (r"\)?" if name.endswith(")") else "")


def letters_of(triples: Sequence[Triple]) -> dict[str, str]:
    """Assign the name of a placeholder to each subject and object of triples, in their order.

    An object's placeholder is chosen by hashing its property, so that it tells the model what kind of value it
    replaces; collisions take the next free one. Other subjects are numbered. Raises ConfigError where there are more
    names than placeholders.

    >>> letters_of([("Bhajji", "country", "India"), ("India", "leaderName", "T._S._Thakur")])
    {'Bhajji': 'qa', 'India': 'sm', 'T._S._Thakur': 'rs'}
    """
    found: dict[str, str] = {}
    roles = {value: role for _, role, value in reversed(triples)}
    others = dict.fromkeys(subject for subject, _, _ in triples if subject not in roles)
    for what, names, available in (("objects", roles, OBJECTS), ("subjects that aren't objects", others, SUBJECTS)):
        if len(names) > len(available):
            raise ConfigError(
                f"delexicalise is True: an entry has {len(names)} {what}, at most {len(available)} are allowed"
            )
    for name, role in roles.items():
        number = crc32(role.encode()) % len(OBJECTS)
        while OBJECTS[number] in found.values():
            number = (number + 1) % len(OBJECTS)
        found[name] = OBJECTS[number]
    found |= dict(zip(others, SUBJECTS, strict=False))
    return {name: found[name] for triple in triples for name in (triple[0], triple[2])}


def spoken(name: str) -> str:
    """A name without underscores, and without the quotes around it or around a number with a unit.

    >>> spoken('"Bolt"'), spoken('"52.0"(minutes)'), spoken('"Smashed" or "squeezed"')
    ('Bolt', '52.0 (minutes)', '"Smashed" or "squeezed"')
    """
    name = re.sub(r'^"([\d.,]+)"(?=\()', r"\1 ", re.sub(r'^"([^"]*)"$', r"\1", name.strip()))
    return name.replace("_", " ").strip()


def _property(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def folded(text: str) -> str:
    """The text in lower case without accents, character for character."""
    return "".join(map(_folded, text))


@cache
def _folded(character: str) -> str:
    return unicodedata.normalize("NFKD", character)[0].lower()[0]
