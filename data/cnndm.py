"""CNN/DailyMail 3.0.0: news articles and their highlights (Hermann et al. 2015; See, Liu, Manning, ACL 2017)."""

from collections.abc import Iterator
from typing import ClassVar

from data.files import Row
from data.source import TextToText
from data.task import Example

INSTRUCTION = "\n\nTL;DR:"


class CNNDailyMail(TextToText):
    """CNN/DailyMail: an article is summarised by its highlights, one per line."""

    name: ClassVar[str] = "cnndm"
    columns: ClassVar[tuple[str, ...]] = ("article", "highlights")
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "rouge1", "rouge2", "rougeL", "rougeLsum", "bertscore")
    repository: ClassVar[str] = "abisee/cnn_dailymail"
    configuration: ClassVar[str | None] = "3.0.0"
    # Measured in OPT tokens on 100 training articles: articles have 809 tokens (median; quartiles 577 and 1,088), so 39
    # are truncated; highlights with the end token have 63 (median; maximum 145), and 2 are longer than 128.
    max_prompt_tokens: ClassVar[int] = 896
    max_new_tokens: ClassVar[int] = 128
    horizon: ClassVar[int] = 64

    def examples(self, name: str, row: Row) -> Iterator[Example]:
        """The article followed by "TL;DR:", GPT-2's prompt for summaries, and all highlights as one reference."""
        highlights = row.text("highlights").strip()
        yield Example(
            id=name,
            prompt=row.text("article") + INSTRUCTION,
            references=(highlights,),
            targets=(" " + highlights,),
            instruction=INSTRUCTION,
        )
