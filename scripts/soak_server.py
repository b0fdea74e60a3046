"""Run the server at twice its capacity with good and bad clients, and check that no answer is lost, mixed up or wrong.

    python scripts/soak_server.py outputs/e2e-tiny --data-dir E2E_FOLDER --seconds 600

It starts `skipdecode serve`, measures its capacity all along and sends twice as many requests at random times. Most are
valid: complete and streamed ones, at three speeds and lossless. Other clients disconnect, read slowly, or send invalid
JSON, huge bodies, prompts that are too long, wrong keys or unknown models. At the end the server gets SIGTERM while it
is answering.

Every valid answer is compared with `skip_generate` of its prompt alone, and every other one with the status that it
must have. Status 429 with Retry-After is correct while the queue is full, and status 503 or a closed connection
after SIGTERM. The exit status is 1 for any wrong answer, for a server that ends with another status than 0
or logs anything besides one line per request, and if it uses over --allow megabytes more in the last tenth of the time
than in the second.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import psutil

from data import load_task
from eval.loading import task_options
from skipdecode import load, skip_generate
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError

KEY, NAME, SPEEDS = "a key of the soak", "served", (1, 2, 3)
KINDS = {"stream": 50, "whole": 15, "vanish": 12, "slow": 5, "rubbish": 6, "huge": 3, "long": 3, "key": 4, "model": 2}
STATUS = {"rubbish": 400, "huge": 413, "long": 400, "key": 401, "model": 404}
BURST = 96  # simultaneous requests that measure the server's capacity


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", metavar="DIR")
    add("--data-dir", metavar="DIR", help="the task's local folder; default: the Hub, or built in")
    add("--seconds", type=float, default=600.0, metavar="S")
    add("--prompts", type=int, default=40, metavar="N", help="different prompts (default 40)")
    add("--allow", type=float, default=8.0, metavar="MB", help="growth that is allowed as noise (default 8)")
    options = parser.parse_args()
    soak = Soak(options.checkpoint, options.data_dir, options.prompts)
    return asyncio.run(soak.run(options.seconds, options.allow))


class Soak:
    """A server, its clients and their results."""

    def __init__(self, checkpoint: str, data_dir: str | None, prompts: int) -> None:
        model, tokenizer = load(checkpoint)
        name, options = task_options(None, SkipConfig.of(model.config))
        task = load_task(name, path=data_dir, **options)
        self.max_new_tokens = task.max_new_tokens
        self.texts: dict[tuple[str, int], str] = {}
        for example in task.load("test")[:prompts]:
            inputs = tokenizer([example.prompt], return_tensors="pt")
            for speed in SPEEDS:
                how: Any = {"speedup": speed, "max_new_tokens": self.max_new_tokens, "do_sample": False}
                out = model.generate(**inputs, custom_generate=skip_generate, **how)
                new = out[0, inputs["input_ids"].shape[1] :]
                self.texts[example.prompt, speed] = str(
                    tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                )
        self.command = [sys.executable, "-m", "skipdecode", "serve", checkpoint, "--port", "0", "--name", NAME]
        self.command += ["--queue", "64", "--max-new-tokens", str(self.max_new_tokens)]
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.draw = random.Random(0)
        self.told_to_end = False

    async def run(self, seconds: float, allow: float) -> int:
        """Send requests for this time. Returns the exit status."""
        environment = {**os.environ, "SKIPDECODE_API_KEY": KEY}
        server = subprocess.Popen(self.command, env=environment, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            while not (found := re.search(r"on (http://[\d.:]+)/v1", line := server.stderr.readline())):
                if not line:
                    raise ConfigError("the server didn't start")
            reading = asyncio.create_task(asyncio.to_thread(self._read, server.stderr))
            self.address = found[1]
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
                self.session = session
                held = await self._load(seconds, psutil.Process(server.pid))
                await self._end(server)
            await reading
        finally:
            server.kill()
        tenth = max(1, len(held) // 10)
        early, late = statistics.median(held[tenth : 2 * tenth]), statistics.median(held[-tenth:])
        print(f"answers: {dict(sorted(self.found.items()))}")
        print(f"memory: {early:.1f} MB in the second tenth of the time, {late:.1f} MB in the last")
        print(f"the server ended with status {server.returncode}; {len(self.wrong)} answers were wrong")
        return int(bool(self.wrong) or server.returncode != 0 or late - early > allow)

    def _read(self, lines: Any) -> None:
        for line in lines:
            if re.match(r"[\d-]+ [\d:]+ (GET|POST) ", line) is None and "stopped" not in line:
                self._note(f"unexpected log line: {line.strip()}")

    def _right(self) -> int:
        """Number of correct answers so far, without refusals."""
        return sum(count for name, count in self.found.items() if name.endswith((": right", ": vanished")))

    def _note(self, line: str) -> None:
        self.wrong.append(line)
        if len(self.wrong) <= 50:
            print(line, flush=True)

    async def _load(self, seconds: float, process: psutil.Process) -> list[float]:
        """Send requests at twice the server's capacity. Returns the megabytes that it used in each second."""
        while True:
            with suppress(aiohttp.ClientError):
                async with self.session.get(f"{self.address}/health"):
                    break
            await asyncio.sleep(0.1)
        start = time.monotonic()
        await asyncio.gather(*(self._one("stream") for _ in range(BURST)))
        carried = self._right() / (time.monotonic() - start)
        print(f"capacity: {carried:.1f} requests per second; sending twice as many for {seconds:g} s", flush=True)
        held: list[float] = []
        going: set[asyncio.Task[None]] = set()
        start = now = told = looked = time.monotonic()
        right = self._right()
        while now < start + seconds:
            kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
            task = asyncio.create_task(self._one(kind))
            going.add(task)
            task.add_done_callback(going.discard)
            now += self.draw.expovariate(2 * carried)
            await asyncio.sleep(now - time.monotonic())
            clock = time.monotonic()
            if clock - start > len(held):
                held.append(process.memory_info().rss / 1e6)
            if clock > looked + 5:  # the capacity changes with the machine's other load
                carried = max(1.0, (self._right() - right) / (clock - looked))
                looked, right, now = clock, self._right(), clock
            if clock > told + 30:
                told = clock
                done = f"{sum(self.found.values())} answers, {len(self.wrong)} wrong, {len(going)} pending"
                print(f"{told - start:.0f} s: {done}, {held[-1]:.1f} MB, {carried:.1f} per second", flush=True)
        self.going = going
        return held

    async def _end(self, server: "subprocess.Popen[str]") -> None:
        """Send SIGTERM with requests pending, which must still be answered, and wait for the end."""
        print(f"SIGTERM, with {len(self.going)} requests pending", flush=True)
        self.told_to_end = True
        server.send_signal(signal.SIGTERM)
        await asyncio.gather(*self.going)
        await asyncio.to_thread(server.wait, 60)

    async def _one(self, kind: str) -> None:
        prompt, speed = self.draw.choice(list(self.texts))
        body: Any = {"model": NAME, "prompt": prompt, "speedup": speed, "stream": kind != "whole", "temperature": 0}
        key, expected = KEY, self.texts[prompt, speed]
        if self.draw.random() < 0.1:
            del body["speedup"]
            body["lossless"], expected = True, self.texts[prompt, 1]
        if kind == "huge":
            body["prompt"] = "a" * 2**21
        elif kind == "long":
            body["prompt"] = "a " * 5000
        elif kind == "key":
            key = "wrong"
        elif kind == "model":
            body["model"] = "other"
        content = json.dumps(body)
        if kind == "rubbish":
            content = content[: self.draw.randrange(len(content))]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            async with self.session.post(
                f"{self.address}/v1/completions", data=content.encode(), headers=headers
            ) as answer:
                outcome = await self._judge(kind, answer, expected)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError) as error:
            outcome = f"{type(error).__name__} {error}"
            if kind == "huge" and not isinstance(error, asyncio.TimeoutError):
                outcome = "right"  # it was refused while it was being sent
            elif self.told_to_end and isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
                outcome = "refused, as it ends"  # a request that the server had read would have been answered
        self.found[f"{kind}: {outcome}" if len(outcome) < 40 else f"{kind}: wrong"] += 1
        if outcome not in ("right", "busy", "vanished", "refused, as it ends"):
            self._note(f"{kind}: {outcome}")

    async def _judge(self, kind: str, answer: aiohttp.ClientResponse, expected: str) -> str:
        if answer.status == 429 and kind not in ("rubbish", "huge", "key", "model"):
            return "busy" if "Retry-After" in answer.headers else "429 without Retry-After"
        if answer.status == 503 and self.told_to_end:
            return "refused, as it ends"
        if answer.status != STATUS.get(kind, 200):
            return f"status {answer.status}: {(await answer.text())[:200]}"
        if kind in STATUS:
            return "right" if (await answer.json())["error"]["message"] else "an error without a message"
        if kind == "whole":
            text, end = (choice := (await answer.json())["choices"][0])["text"], choice["finish_reason"]
            return "right" if end and text == expected else f"{text!r} instead of {expected!r}"
        text, end, leave_at = "", None, self.draw.randint(0, 10)
        parts = 0
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return f"an error: {event}"
            choice = event["choices"][0]
            text, end = text + choice["text"], choice["finish_reason"]
            parts += 1
            if kind == "vanish" and parts >= leave_at:
                answer.close()
                return "vanished"
            if kind == "slow":
                await asyncio.sleep(0.2)
        return "right" if end and text == expected else f"{text!r} instead of {expected!r}"


if __name__ == "__main__":
    sys.exit(run_command(main))
