"""Reddit TL;DR: posts and their authors' summaries (Völske et al. 2017), as filtered by Stiennon et al. 2020."""

import re
from collections.abc import Iterator
from typing import ClassVar

from data.files import Row
from data.source import TextToText
from data.task import Example
from skipdecode.errors import ConfigError

INSTRUCTION = "\n\nTL;DR:"
# Some copies of the data separate these by a single newline; all prompts are brought into one format.
_HEADED = re.compile(r"(SUBREDDIT: .*?)\n+(TITLE: .*?)\n+(POST: .*)", re.DOTALL)


class TLDR(TextToText):
    """Reddit TL;DR, with the summary in a column `completion` (trl-lib/tldr) or `label` (CarperAI's copy)."""

    name: ClassVar[str] = "tldr"
    columns: ClassVar[tuple[str, ...]] = ("prompt", "completion")
    repository: ClassVar[str] = "trl-lib/tldr"
    # From Stiennon et al., not measured: they kept posts of at most 512 tokens and summaries of 24 to 48 tokens, by
    # GPT-2's tokenizer, whose merges OPT shares.
    max_prompt_tokens: ClassVar[int] = 512
    max_new_tokens: ClassVar[int] = 64
    horizon: ClassVar[int] = 32

    def examples(self, name: str, row: Row) -> Iterator[Example]:
        """The prompt "SUBREDDIT: …\\n\\nTITLE: …\\n\\nPOST: …\\n\\nTL;DR:" and its single summary."""
        prompt = row.text("prompt").rstrip()
        if not prompt.endswith(INSTRUCTION.strip()):
            raise ConfigError(f"{row.where}: prompt must end in {INSTRUCTION.strip()}, got {prompt[-20:]!r}")
        body = prompt.removesuffix(INSTRUCTION.strip()).strip()
        headed = _HEADED.fullmatch(body)
        if headed is not None:
            body = "\n\n".join(headed.groups())
        # In rows with both columns, `label` isn't the summary.
        summary = row.text("label" if "completion" not in row.values and "label" in row.values else "completion")
        yield Example(
            id=name,
            prompt=body + INSTRUCTION,
            references=(summary.strip(),),
            targets=(" " + summary.strip(),),
            instruction=INSTRUCTION,
        )
