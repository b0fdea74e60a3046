"""The container file, the Kubernetes example and the dashboard fit the real server."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from small_checkpoints import save_checkpoint
from starlette.testclient import TestClient

import skipdecode
from skipdecode.cli.options import command_parser
from skipdecode.serve.app import make_app
from skipdecode.serve.settings import API_KEY, ServeSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KEY = "a key"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A server with a key that has answered a request."""
    model, tokenizer = skipdecode.load(str(save_checkpoint(tmp_path_factory.mktemp("served") / "tiny", 6)))
    app = make_app(skipdecode.Engine(model, tokenizer), tokenizer, ServeSettings("tiny", api_key=KEY))
    with TestClient(app, headers={"Authorization": f"Bearer {KEY}"}) as found:
        assert found.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 3}).status_code == 200
        yield found


def container() -> dict[str, list[str]]:
    """The instructions of the container file, each with its arguments."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            instruction, value = line.split(maxsplit=1)
            found.setdefault(instruction, []).append(value)
    return found


def pods() -> dict[str, Any]:
    """The specification of the Kubernetes example's pods."""
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def arguments(words: list[str]) -> Any:
    return command_parser("serve").parse_args(words)


def test_the_container_runs_the_server_as_another_user_than_root_and_asks_for_its_health(client: TestClient) -> None:
    instructions = container()
    program, command, *words = json.loads(instructions["ENTRYPOINT"][0])
    assert (program, command) == ("skipdecode", "serve")
    options = arguments([*words, *json.loads(instructions["CMD"][0])])
    assert (options.host, str(options.port)) == ("0.0.0.0", instructions["EXPOSE"][0])
    assert int(instructions["USER"][-1]) > 0
    probed = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", instructions["HEALTHCHECK"][0])
    assert probed is not None
    assert int(probed[1]) == options.port
    assert client.get(probed[2], headers={"Authorization": ""}).status_code == 200


def test_the_container_file_copies_what_exists_and_installs_extras_that_exist() -> None:
    instructions = container()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in instructions["COPY"]:
        for name in copied.split()[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored, "only these names are sent to the build"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    defaults = dict(argument.split("=") for argument in instructions["ARG"])
    assert {*defaults["EXTRAS"].split(","), "ray"} <= extras.keys()
    for run in instructions["RUN"]:
        assert shlex.split(run), "quotes are closed"


def test_the_kubernetes_example_runs_the_container_with_options_and_probes_of_the_server(client: TestClient) -> None:
    pod = pods()
    [server] = pod["containers"]
    _, _, *words = json.loads(container()["ENTRYPOINT"][0])
    options = arguments([*words, *server["args"]])
    assert options.checkpoint in {mount["mountPath"] for mount in server["volumeMounts"]}
    [port] = server["ports"]
    assert port["containerPort"] == options.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = server[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert client.get(asked["path"], headers={"Authorization": ""}).status_code == 200
    stopping = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > stopping + options.drain + 5
    assert [variable["name"] for variable in server["env"]] == [API_KEY]
    assert str(pod["securityContext"]["runAsUser"]) == container()["USER"][-1]


def test_the_dashboard_shows_metrics_that_the_server_exports(client: TestClient) -> None:
    exported = set(re.findall(r"^(skipdecode_\w+)", client.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    shown = {name for query in queries for name in re.findall(r"skipdecode_\w+", query)}
    assert len(shown) > 10
    assert shown <= exported, shown - exported
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
