"""README, docs, help texts, messages, reports and pictures use standard terms, not the project's former ones."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOURNALS = ("research", "decisions")  # they keep the words of their day
CODE = ("skipdecode", "configs", "data", "eval", "train", "scripts")

# (what to say, pattern of what not to say, examples that it finds, examples that are standard English)
TERMS = [
    (
        "sequence",
        r"\bwhole texts?\b|\btexts? (?:that )?(?:ends?|decodes?|waits?|joins?)\b|\bsingle texts?\b"
        r"|\brows? that decodes?\b|\btexts? (?:a|per) prompt\b|\b(?:texts?|tokens) of a text\b",
        ["speeds of whole texts", "a row that decodes", "beams and several texts a prompt", "tokens of a text"],
        ["the text is a string", "text that is appended", "prompts and completions are texts"],
    ),
    (
        "position or KV slot",
        r"\b\d+ columns?\b|\b(?:prompt|padded|layer)[- ]columns\b|\bcolumns? of (?:the )?(?:prompt|cache)s?\b",
        ["behind 400 columns", "the share of layer-columns computed", "columns of the prompt"],
        ["the column `question` of the table", "two columns", "prompt_column=question", "a prompt column and"],
    ),
    ("fast path", r"\blean\b", ["the lean decoder"], ["it can learn", "clean"]),
    (
        "end-to-end (prefill + decode)",
        r"\bthe whole\b(?!\s+[a-z]+\b(?<!\bis)(?<!\bof)(?<!\bat)(?<!\band)(?<!\bor)(?<!\bby)(?<!\bin)(?<!\bwas))"
        r"|\bwhole \(",
        ["speeds of the whole, at batch 32", "the whole is 2.6 times as fast", "whole (asked)"],
        ["the whole test set", "the whole model is exported"],
    ),
    (
        "target / measured speedup",
        r"\basked */ *got\b|\b(?:is|are|was|what|speeds?|than) asked\b(?! (?:for|about|by)\b)"
        r"|^(?:asked|got)$|\| *(?:asked|got) *\|",
        ["asked/got", "nearer to what was asked", "asked", "| asked | BLEU |", "the speed asked"],
        ["frequently asked questions", "expected a list, got a number", "it is asked for", "no request got a response"],
    ),
    (
        "constant / decaying schedule",
        r"\bbudgets? that (?:stays?|falls?|doesn't fall|don't fall)\b|\b(?:falling|staying) budgets?\b",
        ["budgets that stay", "a budget that falls", "falling budgets"],
        ["the budget never rises"],
    ),
    (
        "identical output; self-speculative decoding",
        r"\bdepth's (?:own )?texts?\b",
        ["full depth's own text", "each as long as full depth's text"],
        ["full depth's output"],
    ),
    (
        "acceptance rate; best draft depth",
        r"\b(?:layers|drafts?) (?:that )?(?:don't |doesn't )?pays?\b|\bdrafts? (?:are |is )?(?:nearly always )?taken\b",
        ["layers that pay", "where drafts don't pay", "drafts taken"],
        ["every token pays for its layers", "drafts are accepted"],
    ),
    (
        "fraction of the measured copy bandwidth",
        r"\bof a copy\b(?! of)",
        ["at 0.85 of a copy", "0.59 of a copy's bandwidth"],
        ["out of a copy of the model"],
    ),
    (
        "analytical cost model; calibrated profile",
        r"\bby bytes\b|\b(?:machine's|measured|training machine's) clocks?\b|\bby the clock\b",
        ["solved by bytes and operations", "this machine's clock", "by a measured clock"],
        ["a wall-clock time", "it reads 98 M bytes"],
    ),
    (
        "maximum, minimum",
        r"\b(?:at|as|its) the (?:most|least)\b|\bthe (?:most|least)(?=[.,;:)]|$| that (?:can|is|a)\b)"
        r"|\bof the (?:most|least)$",
        ["and name the most that can be reached", "its targets are the most."],
        ["at most 8 rows", "the most important layer", "it costs the least memory"],
    ),
    ("baselines", r"\brivals?\b", ["beside its rivals"], ["arrival"]),
    (
        "slot error rate (SER)",
        r"\| *slot errors *\||^slot errors$|\b\d+(?:\.\d+)? (?:%|percent) (?:of )?slot errors\b",
        ["| slot errors | BLEU |", "slot errors"],
        ["Slot errors of one output.", "slot error rate"],
    ),
    ("static batching", r"\block-?step\b(?!-)", ["in lock-step"], ["lock-step-3x is the name of a system"]),
    ("invariants", r"\blaws?\b", ["law 5"], ["the lawn"]),
    ("subpackages", r"\brooms\b", ["the rooms of the library"], ["hotel room"]),
    ("load of the machine", r"\bweather\b", ["the weather of a shared machine"], ["whether"]),
]
PATTERNS = [(say, re.compile(pattern, re.IGNORECASE | re.MULTILINE)) for say, pattern, *_ in TERMS]


def former_terms(where: str, text: str, line: int = 1) -> Iterator[str]:
    """Each former term in a text, with its place and what to say instead."""
    for say, pattern in PATTERNS:
        for match in pattern.finditer(text):
            at = line + text.count("\n", 0, match.start())
            yield f"{where}:{at}: {match[0]!r} in {text[max(0, match.start() - 30) : match.end() + 20]!r}, say {say!r}"


@pytest.mark.parametrize(("say", "bad", "good"), [(say, bad, good) for say, _, bad, good in TERMS])
def test_a_pattern_finds_the_former_term_and_no_standard_english(say: str, bad: list[str], good: list[str]) -> None:
    (pattern,) = [pattern for each, pattern in PATTERNS if each == say]
    assert [text for text in bad if not pattern.search(text)] == []
    assert [text for text in good if pattern.search(text)] == []


def test_readme_and_documentation_use_standard_terms() -> None:
    pages = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.parent.name not in JOURNALS]
    found = [each for page in pages for each in former_terms(str(page.relative_to(ROOT)), page.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_help_messages_reports_and_pictures_use_standard_terms() -> None:
    found: list[str] = []
    for path in sorted(path for package in CODE for path in (ROOT / package).rglob("*.*")):
        where = str(path.relative_to(ROOT))
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found += former_terms(where, node.value, node.lineno)
        elif path.suffix in (".md", ".html", ".js", ".css", ".svg"):
            found += former_terms(where, path.read_text("utf-8"))
    assert not found, "\n".join(found)
