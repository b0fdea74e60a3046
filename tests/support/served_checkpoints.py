"""A server in this process with a checkpoint, for OpenAI's client and plain HTTP clients."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import uvicorn

import skipdecode
from skipdecode import Engine
from skipdecode.serve.app import make_app
from skipdecode.serve.settings import ServeSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON_TYPE = {"Content-Type": "application/json"}
# Like the templates of models with tool calls: it tests for the key tool_calls and takes arguments as objects.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}"
    "{% if c.function is defined %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)


class Server(NamedTuple):
    client: openai.OpenAI
    http: httpx.Client
    tokenizer: Any

    def post(self, chat: bool, body: Any) -> httpx.Response:
        # Not by `json=`, which refuses NaN and lone surrogates.
        return self.http.post(CHAT if chat else COMPLETIONS, content=json.dumps(body).encode(), headers=JSON_TYPE)

    def text(self, chat: bool, body: Any) -> str:
        """The text of the response to a valid request."""
        answer = self.post(chat, body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return str(choice["message"]["content"] if chat else choice["text"])

    def text_of(self, prompt: str) -> str:
        """The text that follows the output of a chat template."""
        tokens = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return self.text(False, {"model": "tiny", "prompt": tokens})


@contextmanager
def started(folder: Path, template: str = TEMPLATE, **more: Any) -> Iterator[Server]:
    """A server in a thread of this process, until the block ends."""
    model, tokenizer = skipdecode.load(str(folder))
    tokenizer.chat_template = template
    app = make_app(Engine(model, tokenizer), tokenizer, ServeSettings("tiny", new_tokens=4, **more))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    try:
        with client, httpx.Client(base_url=address) as http:
            yield Server(client, http, tokenizer)
    finally:
        server.should_exit = True
        thread.join()
