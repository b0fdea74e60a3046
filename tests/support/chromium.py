"""A page in headless Chromium, driven by Chromium's own protocol."""

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --disable-dev-shm-usage --remote-debugging-port=0"
)


class Page:
    """The only page of a browser.

    Attributes:
        complaints: what the page wrote to the console, and its errors.
        requests: the addresses that it asked for.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol. Returns its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=60)).data)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            event = message.get("method")
            if event == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"]))

    async def open(self, address: str, width: int, height: int = 900) -> None:
        """Load a page in a window of this size."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.send("Page.navigate", url=address)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def run(self, expression: str) -> Any:
        """Evaluate JavaScript. Returns its value."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        for _ in range(600):
            if await self.run(expression):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(expression)

    async def press(self, key: str, code: int, *, control: bool = False) -> None:
        """Press a key, given its name and Windows key code."""
        how = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 * control}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **how)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **how)

    async def picture(self, path: Path) -> None:
        """Write a picture of all of the page."""
        found = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def opened(profile: Path) -> AsyncIterator[Page]:
    """A browser with an empty page, until the block ends; `profile` is an empty folder for its files."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        async with aiohttp.ClientSession() as session:
            targets = await _targets(session, profile / "DevToolsActivePort")
            address = next(each["webSocketDebuggerUrl"] for each in targets if each["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        await process.wait()


async def _targets(session: aiohttp.ClientSession, file: Path) -> list[dict[str, Any]]:
    """The pages of a browser that writes its port to this file once it has started."""
    for _ in range(600):
        if file.exists() and len(lines := file.read_text().splitlines()) == 2:
            async with session.get(f"http://127.0.0.1:{lines[0]}/json") as answer:
                found: list[dict[str, Any]] = await answer.json()
                if any(each["type"] == "page" for each in found):
                    return found
        await asyncio.sleep(0.1)
    raise TimeoutError("Chromium hasn't started after a minute")
