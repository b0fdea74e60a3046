"""The page of a server in headless Chromium: a chat at two speeds side by side."""

import asyncio
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chromium import CHROMIUM, Page, opened
from served_checkpoints import TEMPLATE, Server, started
from small_checkpoints import save_checkpoint

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium isn't installed"),
]
WIDTHS = (390, 1100)
WIDER_THAN_THE_PAGE = """[...document.querySelectorAll('body *')].filter((each) => !each.closest('svg')
    && each.getBoundingClientRect().right > innerWidth + 0.5).map((each) => each.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_chats_at_two_speeds_and_marks_the_tokens_that_differ(tmp_path: Path, width: int) -> None:
    folder = save_checkpoint(tmp_path / "tiny", 6, max_position_embeddings=512)
    pictures = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    with started(folder, TEMPLATE, speedup=2) as server:
        asyncio.run(_chat(server, tmp_path / "profile", width, pictures / f"chat-{width}.png"))


async def _chat(server: Server, profile: Path, width: int, picture: Path) -> None:
    address = str(server.http.base_url)
    async with opened(profile) as page:
        await page.open(f"{address}/", width)
        for key, code in (("Tab", 9), ("Tab", 9)):  # to the prompt, and to the first speed
            await page.press(key, code)
        assert await page.run("document.activeElement.id") == "first"
        for said in ("vehicle: tram", "to: Saltfern"):
            await page.run(f"at('prompt').value = {said!r}; at('prompt').focus()")
            await page.press("Enter", 13, control=True)
            await page.until("/tokens? differ|are the same/.test(at('status').textContent)")
        await _check_turns(page, server)
        assert await page.run(WIDER_THAN_THE_PAGE) == []
        await page.picture(picture)
        await page.run("known.model = 'another'; at('prompt').value = 'a'; send()")
        await page.until("at('status').className === 'wrong'")
        assert "is not served here" in await page.run("at('status').textContent")
        assert await page.run("at('prompt').value") == "a"
        assert await page.run("chats.map((messages) => messages.length)") == [4, 4]
        await page.run("at('again').click()")
        assert await page.run("[turns.children.length, chats.flat().length]") == [0, 0]
        assert {urlsplit(each).netloc for each in page.requests} == {urlsplit(address).netloc}
        assert [each for each in page.complaints if "404" not in each] == []


async def _check_turns(page: Page, server: Server) -> None:
    """Check both sides of a chat of two turns against the server's own answers."""
    chats = await page.run("chats")
    texts = await page.run("[...document.querySelectorAll('.text')].map((each) => each.textContent)")
    marks = await page.run(
        "[...document.querySelectorAll('.turn')].map((each) => each.querySelectorAll('mark').length)"
    )
    for side, speedup in enumerate((1, 2)):
        for turn in range(2):
            asked = chats[side][: 2 * turn + 1]
            answer = server.client.chat.completions.create(
                model="tiny", messages=asked, max_tokens=4, extra_body={"speedup": speedup}
            )
            assert chats[side][2 * turn + 1]["content"] == answer.choices[0].message.content
            assert texts[2 * turn + side] == answer.choices[0].message.content
    for turn, count in enumerate(marks):
        assert (count == 0) == (texts[2 * turn] == texts[2 * turn + 1])
    assert sum(marks) > 0, "the two speeds gave the same answers"
    figures = await page.run("[...document.querySelectorAll('.figures')].map((each) => each.textContent)")
    layers = [float(re.findall(r"([\d.]+) layers", each)[0]) for each in figures]
    assert layers[0] == layers[2] == 6 > layers[1]
    status = await page.run("at('status').textContent")
    assert status.startswith(f"{marks[1]} tokens differ" if marks[1] else "Both answers")
