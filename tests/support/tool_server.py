"""Fixtures of a server in this process whose chat template has tools, by pytest_plugins = ["tool_server"]."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_checkpoints import Server, started
from small_checkpoints import save_checkpoint

# Like that of Hermes: tools as JSON, and calls as JSON between tags.
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call by <tool_call>.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ [c.function.name, c.function.arguments] | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served") / "tiny", 4, max_position_embeddings=512)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with started(checkpoint, TOOL_TEMPLATE) as found:
        yield found
