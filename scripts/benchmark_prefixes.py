"""Measure what the prefix cache and prompts in chunks change for a server's clients.

    python scripts/benchmark_prefixes.py HuggingFaceTB/SmolLM2-135M-Instruct --rounds 5 --output outputs/prefixes.json

Servers run side by side and are measured in turns, in two tests:

- "chats": many chats arrive at once, with a system prompt in common that is new in each round.
- "long prompt": a long prompt arrives while other requests decode. The longest wait is that between two tokens of one
  of the others, after the prompt has arrived.

`--peer` also measures `transformers serve` with continuous batching. The figures printed are medians of the rounds.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy
from transformers import AutoTokenizer

from eval.load.client import Endpoint, Outcome, play
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError
from skipdecode.timing.interleave import order_of_turn

SERVERS = {
    "defaults": [],
    "no prefix cache": ["--prefix-mib", "0"],
    "no prefix cache, no chunks": ["--prefix-mib", "0", "--wave-tokens", "1000000"],
}
PEER = "transformers serve"
TIMEOUT = 600.0  # seconds for the start of a server, and for a request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", metavar="DIR")
    add("--rounds", type=int, default=5, metavar="N")
    add("--chats", type=int, default=32, metavar="N", help="chats that arrive at once (default 32)")
    add("--system-tokens", type=int, default=400, metavar="N", help="length of the system prompt (default 400)")
    add("--decoding", type=int, default=8, metavar="N", help="requests that decode (default 8)")
    add("--long-tokens", type=int, default=2000, metavar="N", help="length of the long prompt (default 2000)")
    add("--delay", type=float, default=5.0, metavar="S", help="when the long prompt arrives (default 5)")
    add("--new-tokens", type=int, default=32, metavar="N", help="new tokens of a chat (default 32)")
    add("--decoded-tokens", type=int, default=256, metavar="N", help="of the requests that decode (default 256)")
    add("--peer", action="store_true", help="measure transformers serve too")
    add("--output", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args()
    prompts = Prompts(options.checkpoint)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        names = [*SERVERS, *([PEER] if options.peer else [])]
        urls = {name: stack.enter_context(started(name, options.checkpoint)) for name in names}
        for number in range(-1, options.rounds):  # the first round warms up
            for name in order_of_turn(names, max(number, 0)):
                url, model = urls[name]
                row = {"round": number, "server": name}
                row |= asyncio.run(chats(url, model, prompts, options, number))
                row |= asyncio.run(long_prompt(url, model, prompts, options, number))
                print(row, file=sys.stderr)
                rows += [row] if number >= 0 else []
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"options": vars(options) | {"output": None}, "rows": rows}, indent=1))
    measures = [name for name in rows[0] if name not in ("round", "server")]
    print(" | ".join(["server", *measures]))
    for name in names:
        medians = [statistics.median(row[each] for row in rows if row["server"] == name) for each in measures]
        print(" | ".join([name, *(f"{value:.3g}" for value in medians)]))
    return 0


class Prompts:
    """Prompts of given lengths, different ones for each seed."""

    def __init__(self, checkpoint: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def text(self, tokens: int, seed: int) -> str:
        """A text of about so many tokens."""
        draw = numpy.random.default_rng(seed + 1)
        words = ["river", "engine", "market", "doctor", "window", "garden", "train", "letter", "music", "winter"]
        text = f"Number {seed}."
        while len(self._tokenizer(text)["input_ids"]) < tokens:
            text += " " + " ".join(draw.choice(words, 8)) + "."
        return text

    def chat(self, system: str, question: str) -> str:
        """A chat as its template renders it."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


async def chats(url: str, model: str, prompts: Prompts, options: argparse.Namespace, number: int) -> dict[str, float]:
    """Send chats with one system prompt at once. Returns times to the first token, and throughput."""
    system = prompts.text(options.system_tokens, number)
    texts = [prompts.chat(system, f"What is {n} times {number + 7}?") for n in range(options.chats)]
    outcomes = await send(url, model, texts, [0.0] * len(texts), [options.new_tokens] * len(texts))
    first = sorted(outcome.parts[0] for outcome in outcomes)
    seconds = max(outcome.at + outcome.seconds for outcome in outcomes)
    return {
        "first token, 50th percentile (s)": float(numpy.percentile(first, 50)),
        "first token, 95th percentile (s)": float(numpy.percentile(first, 95)),
        "new tokens/s": sum(outcome.tokens for outcome in outcomes) / seconds,
    }


async def long_prompt(
    url: str, model: str, prompts: Prompts, options: argparse.Namespace, number: int
) -> dict[str, float]:
    """Send a long prompt while others decode. Returns the longest wait of these, and the time to its first token."""
    texts = [f"Once upon a time, in year {100 * number + n}," for n in range(options.decoding)]
    texts.append(prompts.text(options.long_tokens, 1000 + number))
    arrivals = [0.0] * options.decoding + [options.delay]
    limits = [options.decoded_tokens] * options.decoding + [4]
    *others, long = await send(url, model, texts, arrivals, limits)
    waits = []
    for outcome in others:
        times = [outcome.at + part for part in outcome.parts]
        waits += [after - before for before, after in pairwise(times) if after > long.at]
    if not waits:
        raise ConfigError("all requests had ended when the long prompt came: lower --delay or raise --decoded-tokens")
    return {"longest wait (s)": max(waits), "first token of the long prompt (s)": long.parts[0]}


async def send(url: str, model: str, texts: list[str], arrivals: list[float], limits: list[int]) -> list[Outcome]:
    """Send prompts at their arrival times. Raises ConfigError if a request fails."""

    async def one(text: str, arrival: float, limit: int) -> Outcome:
        body = {"model": model, "temperature": 0, "max_tokens": limit, "stream_options": {"include_usage": True}}
        [outcome] = await play(Endpoint(url, body), [text], [arrival], TIMEOUT, lambda: None)
        if outcome.error is not None or not outcome.parts:
            raise ConfigError(f"a request failed: {outcome.error or 'no token came'}")
        return outcome

    return await asyncio.gather(*(one(*each) for each in zip(texts, arrivals, limits, strict=True)))


@contextmanager
def started(name: str, checkpoint: str) -> Iterator[tuple[str, str]]:
    """Start a server. Yields its address and the name of its model."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command = ["skipdecode", "serve", checkpoint, "--name", "served", "--cache-gb", "2", "--timeout", str(TIMEOUT)]
    command += SERVERS.get(name, [])
    if name == PEER:
        command = [
            "transformers.cli.transformers",
            "serve",
            checkpoint,
            "--continuous-batching",
            "--log-level",
            "error",
        ]
        command += ["--cb-block-size", "32", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "512"]
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", port], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the server {name!r} doesn't start: {' '.join(command)}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1", checkpoint if name == PEER else "served"
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(run_command(main))
