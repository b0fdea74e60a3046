"""Publishing to a server that speaks the Hub's upload protocol, over real HTTP."""

import io
import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_server import Hub, Repository, serve_hub
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file
from small_runs import train_small

import skipdecode
from eval.card import MARK, write_card
from eval.results import Report
from skipdecode import ConfigError
from skipdecode.checkpoint.checksums import CHECKSUMS_FILE
from skipdecode.checkpoint.remote_code import custom_generate_files
from skipdecode.checkpoint.skip_config import SkipConfig
from train.publish.leaks import find_path, find_secret
from train.publish.parcel import Parcel, pack
from train.publish.send import send
from train.recipe import load_recipe

NAME = "me/small"
EXPECTED = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors", "recipe.yaml", "schedules.png"),
    *("tokenizer.json", "tokenizer_config.json", CHECKSUMS_FILE),
    *(f"custom_generate/{name}" for name in custom_generate_files()),
    *("eval/report.json", "eval/report.md", "eval/frontier.png"),
}
# Files that contain the path of the run, which is outside the working directory.
CLEANED = ("recipe.yaml", "eval/report.json", "eval/report.md")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "run"
    overrides = ["evaluation.speedups=[1,3]", "evaluation.limit=3", "evaluation.max_new_tokens=6"]
    return train_small(folder, "train.max_steps=3", *overrides, drawn=True)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "debug.log").write_text("not for others")
    (folder / "notes.txt").write_text("not for others either")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # its storage is another protocol
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield hub


def arrived(hub: Hub, folder: Path) -> None:
    files = hub.repositories[NAME].files
    assert set(files) == EXPECTED
    for name, content in files.items():
        if name not in CLEANED:
            assert content == (folder / name).read_bytes(), name


def test_the_command_sends_the_checkpoint_and_nothing_else(
    run: Path, hub: Hub, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["publish.py", str(run), NAME, "--tag", "v1", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_path("scripts/publish.py", run_name="__main__")
        return int(str(end.value))

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert publish() == 2
    refusal = "error: there is no terminal to ask for confirmation: pass --yes to send without it\n"
    assert capsys.readouterr().err == refusal
    assert not hub.repositories
    assert publish("--yes") == 0
    printed = capsys.readouterr().out
    arrived(hub, run)
    repository = hub.repositories[NAME]
    assert repository.private
    assert repository.tags == {"v1": repository.commits[-1]}
    assert printed.splitlines()[-1] == f"{hub.address}/{NAME}/commit/{repository.commits[-1]}"
    for name in EXPECTED:
        assert f"  {name}\n" in printed
    assert hub.tokens <= {"Bearer hf_test", None}


def test_an_incomplete_evaluation_is_refused_and_the_existing_one_stays(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(run / "eval", tmp_path / "other")
    (other / "frontier.png").unlink()
    values = json.loads((other / "report.json").read_text())
    (other / "report.json").write_text(json.dumps({**values, "checkpoint": str(run), "date": "another"}))
    before = {file.name: file.read_bytes() for file in (run / "eval").glob("*.*")}
    monkeypatch.setattr(sys, "argv", ["publish.py", str(run), NAME, "--evaluation", str(other), "--dry-run"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path("scripts/publish.py", run_name="__main__")
    assert f"--evaluation {other} has no frontier.png" in capsys.readouterr().err
    assert before == {file.name: file.read_bytes() for file in (run / "eval").glob("*.*")}


def test_a_recipe_with_a_repository_publishes_its_checkpoint_also_after_a_failed_upload(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its own attempts
    hub.breaks = 10**6
    settings = ["train.max_steps=1", "schedule.texts=0", f"publish.repository={NAME}", "publish.tag=first 1"]
    with pytest.raises(ConfigError, match="is trained, and the same command continues with publishing"):
        train_small(tmp_path / "run", *settings)
    assert hub.repositories[NAME].files == {}
    hub.breaks = 0
    folder = train_small(tmp_path / "run", *settings)
    files = hub.repositories[NAME].files
    assert set(files) == {name for name in EXPECTED if not name.startswith("eval/")}
    assert files["config.json"] == (folder / "config.json").read_bytes()
    assert set(hub.repositories[NAME].tags) == {"first 1"}
    for wrong, message in (
        (["publish.repository=small"], "has no owner"),
        ([f"publish.repository={NAME}", "lora.r=2", "lora.merge=false"], "needs merged adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_small(tmp_path / "wrong", *wrong)
    assert not (tmp_path / "wrong").exists()


def draw(path: Path, pixels: bytes, **texts: str) -> None:
    """Write a picture whose pixels are stored uncompressed, with text metadata."""
    metadata = PngInfo()
    for key, text in texts.items():
        metadata.add_text(key, text)
    picture = Image.frombytes("P", (len(pixels), 1), pixels)
    picture.putpalette([n // 3 for n in range(768)])  # without a palette, differences would be stored
    picture.save(path, format="png", compress_level=0, pnginfo=metadata)
    assert pixels in path.read_bytes()


def test_the_metadata_of_pictures_is_checked_for_secrets_but_not_their_pixels(run: Path) -> None:
    draw(run / "schedules.png", b" ~/o/" + SECRETS["Google"].encode())
    assert "schedules.png" in pack(run, NAME).contents
    for text in ("drawn in /home/me/secret data", SECRETS["Google"]):
        draw(run / "schedules.png", b"a", Comment=text)
        with pytest.raises(ConfigError, match=r"schedules.png (contains the local path /home/me|seems to contain a)"):
            pack(run, NAME)
    (run / "schedules.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match=r"schedules.png isn't a PNG"):
        pack(run, NAME)


def test_a_repeated_upload_does_not_send_weights_again(run: Path, hub: Hub) -> None:
    send(pack(run, NAME))
    sent, commits = hub.sent, list(hub.repositories[NAME].commits)
    send(pack(run, NAME))
    assert hub.sent == sent
    assert hub.repositories[NAME].commits == commits
    draw(run / "schedules.png", b"another")
    send(pack(run, NAME), tag="v2")
    assert hub.sent == sent + (run / "schedules.png").stat().st_size
    arrived(hub, run)
    draw(run / "schedules.png", b"a third")
    with pytest.raises(ConfigError, match="the tag 'v2' of me/small belongs to commit"):
        send(pack(run, NAME), tag="v2")


def test_sending_without_a_network_gives_a_one_line_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # between its own attempts
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with pytest.raises(ConfigError, match=r"sending to me/small failed \(.*refused.*: run the same command again"):
        send(pack(run, NAME))


def test_checkpoint_files_of_an_earlier_version_are_replaced_and_other_files_stay(run: Path, hub: Hub) -> None:
    before = {"model-00001-of-00002.safetensors": b"old", "custom_generate/old.py": b"x", "NOTES.md": b"mine"}
    hub.repositories[NAME] = Repository(private=True, files=dict(before))
    send(pack(run, NAME))
    assert hub.repositories[NAME].files.pop("NOTES.md") == b"mine"
    arrived(hub, run)


def test_sending_to_a_public_repository_needs_the_option_public(run: Path, hub: Hub) -> None:
    hub.repositories[NAME] = Repository(private=False)
    with pytest.raises(ConfigError, match="me/small exists and is public: pass --public"):
        send(pack(run, NAME))
    assert hub.repositories[NAME].files == {}
    send(pack(run, NAME), public=True)
    arrived(hub, run)
    send(pack(run, "me/other"), public=True)
    assert not hub.repositories["me/other"].private


def test_an_error_of_the_hub_is_reported_in_one_line(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        self._say({"error": "You don't have the rights"}, 403)

    monkeypatch.setattr("hub_server._Handler.do_POST", refuse)
    with pytest.raises(ConfigError, match=r"^the Hub refused me/small: .*403"):
        send(pack(run, NAME))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "model.safetensors").unlink(), "is damaged: model.safetensors is missing"),
        (lambda run: (run / "model.safetensors").write_bytes(b"\x00" * 99), "model.safetensors has 99 bytes"),
        (lambda run: shutil.copy(run / "config.json", run / "x.safetensors"), "x.safetensors was added"),
        (lambda run: (run / "tokenizer.json").write_text("{"), "is damaged: tokenizer.json has 1 bytes"),
        (lambda run: (run / "config.json").unlink(), "isn't a finished run: it has no config.json"),
        (lambda run: (run / "recipe.yaml").unlink(), "a card is written from config.json and recipe.yaml"),
        (lambda run: without_schedules(run), "has no schedules in its config.json"),
        (lambda run: add(run, "recipe.yaml", "\n# hf_" + "a1" * 17), "seems to contain a token of the Hub"),
        (lambda run: add(run, "eval/report.md", "\nWANDB_API_KEY=" + "0a" * 20), "a key of Weights & Biases"),
        (lambda run: put_metadata(run, {"note": "glpat-" + "a1B2" * 5}), "model.safetensors seems to contain a"),
        (lambda run: put_metadata(run, {"from": "/home/me/base"}), "model.safetensors contains the local path /home"),
        (lambda run: link(run, "recipe.yaml"), "recipe.yaml is a symbolic link to "),
        (lambda run: link(run, "eval"), "is a symbolic link to "),
        (lambda run: (run / "README.md").write_text("kept in /home/me/base."), "contains the local path /home/me/base"),
    ],
)
def test_incomplete_damaged_or_secret_contents_are_refused_before_sending(
    run: Path, hub: Hub, change: Any, message: str
) -> None:
    change(run)
    with pytest.raises(ConfigError, match=message):
        pack(run, NAME)
    assert not hub.tokens, "no request was made"


@pytest.mark.parametrize("name", ["small", "me/", "me/a b", "me/a/b"])
def test_an_invalid_repository_name_is_refused(run: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="repository"):
        pack(run, name)


def test_a_model_card_that_the_user_changed_is_kept(run: Path) -> None:
    card = run / "README.md"
    text = card.read_text()
    assert MARK in text
    card.write_text(text.replace(MARK, "").replace("## Limits", "## My limits"))
    assert isinstance(pack(run, NAME), Parcel)
    assert "## My limits" in card.read_text()
    card.write_text(text)
    pack(run, NAME)
    assert f'from_pretrained("{NAME}")' in card.read_text()


def test_the_model_card_agrees_with_the_folder(run: Path) -> None:
    text = (run / "README.md").read_text()
    metadata = huggingface_hub.ModelCard(text).data
    assert metadata.library_name == "transformers"
    assert "custom_generate" in metadata.tags
    report = json.loads((run / "eval" / "report.json").read_text())
    for row in report["rows"]:
        label, layers, speedup = row["label"], row["mean_layers"], row["wall_clock_speedup"]
        assert f"| {label} | {layers:.2f} of 8 | {label} | {speedup:.2f}x [" in text
    scores = [round(row["scores"]["bleu"], 2) for row in report["rows"]]
    assert [result.metric_value for result in metadata.eval_results] == scores
    assert "](eval/frontier.png)" in text
    assert "one of 4 schedules, drawn again in each step" in text
    assert "{{" not in text


def test_the_model_card_names_the_base_model_only_if_it_is_on_the_hub(run: Path) -> None:
    """Training decides that: a local folder that has been deleted since looks like a Hub name."""
    recipe = (run / "recipe.yaml").read_text().replace("shape: opt-tiny", "shape: null")
    config = SkipConfig.load(run)
    assert config is not None
    for start, linked in ((str(run), False), ("clients/secret-base", False), ("facebook/opt-125m", True)):
        (run / "recipe.yaml").write_text(recipe.replace("name_or_path: null", f"name_or_path: {start}"))
        replace(config, base_model=start if linked else None).save(run)
        text = write_card(run, NAME).read_text()
        assert (f"](https://huggingface.co/{start})" in text) == linked
        assert (huggingface_hub.ModelCard(text).data.base_model == start) == linked
        assert linked or start not in text


def test_local_paths_are_sent_as_relative_ones(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "my home"
    run = shutil.copytree(trained, home / "outputs" / "run")
    recipe = (run / "recipe.yaml").read_text().replace(str(trained), str(run))
    recipe = recipe.replace("\n  path: null", "\n  path: /home/me/secret data/e2e")
    (run / "recipe.yaml").write_text(recipe.replace("project: skipdecode", "project: /home/me/acme/x"))
    report = (run / "eval" / "report.json").read_text().replace(str(trained), str(run))
    values = json.loads(report) | {"command": shlex.join(["python", "-m", "eval", "--data-dir", "/home/me/acme/e2e"])}
    values["unavailable"] = {"meteor": "no data in /home/me/nltk_data/corpora"}
    (run / "eval" / "report.json").write_text(json.dumps(values))
    (run / "eval" / "report.md").write_text(Report.load(run / "eval" / "report.json").to_markdown())
    config = json.loads((run / "config.json").read_text()) | {"_name_or_path": str(home / "base")}
    (run / "config.json").write_text(json.dumps(config))
    (run / CHECKSUMS_FILE).unlink()
    monkeypatch.chdir(home)
    contents = pack(run, NAME).contents
    for name, content in contents.items():
        if isinstance(content, bytes):
            for private in (b"my home", b"secret data", b"/home/me", b"acme", str(tmp_path).encode()):
                assert private not in content, (name, private)
    sent = tmp_path / "sent"
    for name, content in contents.items():
        (sent / name).parent.mkdir(parents=True, exist_ok=True)
        (sent / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    skipdecode.load(str(sent))  # checksums are those of the sent files
    assert load_recipe(str(sent / "recipe.yaml"), of_a_run=True).output.dir == "outputs/run"
    assert load_recipe(str(sent / "recipe.yaml"), of_a_run=True).data.path == "e2e"
    assert Report.load(sent / "eval" / "report.json").checkpoint == "outputs/run"
    assert str(home) in (run / "recipe.yaml").read_text()  # the local file is unchanged


SECRETS = {
    "OpenAI": "sk-proj-" + "aB3_" * 12,
    "GitHub": "github_pat_" + "11ABCDE0Y0" * 3,
    "GitHub OAuth": "gho_" + "a1B2c3D4e5F6" * 3,
    "Slack": "xoxb-1234567890-" + "aB3" * 8,
    "Google": "AIza" + "SyA1b2C" * 5,
    "GitLab": "glpat-" + "aB3dE" * 4,
    "W&B": "0123456789abcdef" * 2 + "01234567",
    "database": "postgres://me:hunter2@db.example.com/x",
    "AWS": "AKIA" + "ABCDEFGH12345678",
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_secret_is_detected_in_every_format(secret: str) -> None:
    assert find_secret(f"notes: {secret}\n") is not None
    assert find_secret(json.dumps({"notes": [secret]})) is not None


def test_a_password_is_detected_as_a_secret_and_a_snapshot_of_the_hubs_cache_is_not() -> None:
    assert find_secret("password: correct-horse-1\n", "recipe.yaml") is not None
    assert find_secret('{"password": "correct-horse-1"}\n', "config.json") is not None
    commit = "27dcfa74d334bc871f3234de431e71c6eeba5dd6"
    assert find_secret(f"name_or_path: /c/models--facebook--opt-1.3b/snapshots/{commit}\n") is None
    assert find_secret(f"key: {commit}\n") is not None


def test_real_vocabularies_and_documents_are_not_detected_as_secrets(shared_data: Path) -> None:
    """The vocabulary has 50,000 real words; the files of the runs above are packed and sent too."""
    for file in (shared_data / "opt").iterdir():
        assert find_secret(file.read_text(encoding="utf-8")) is None
    readme = Path(__file__).resolve().parents[2] / "README.md"
    assert find_secret(readme.read_text(encoding="utf-8"), "README.md") is None
    for text in ("and/or /r/AskReddit/x", "https://huggingface.co/me/x", "12/3/4 tokens/s", "/usr/bin/env python"):
        assert find_path(text) is None, text


def test_a_recipe_cannot_read_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "hunter2")
    for value in ("${oc.env:TOKEN_OF_MINE}", "x-${oc.env:TOKEN_OF_MINE,y}", "${oc.${tracking.project}:TOKEN_OF_MINE}"):
        with pytest.raises(ConfigError, match="can't read environment variables") as caught:
            load_recipe("quickstart", [f"tracking.name={value}", "tracking.project=env"])
        assert "hunter2" not in str(caught.value)


def without_schedules(run: Path) -> None:
    values = json.loads((run / "config.json").read_text())
    del values["skipdecode"]
    (run / "config.json").write_text(json.dumps(values))
    (run / CHECKSUMS_FILE).unlink()


def link(run: Path, name: str) -> None:
    (run / name).rename(run.parent / "elsewhere")
    (run / name).symlink_to(run.parent / "elsewhere")


def put_metadata(run: Path, metadata: dict[str, str]) -> None:
    file = run / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", **metadata})
    (run / CHECKSUMS_FILE).unlink()


def add(run: Path, name: str, text: str) -> None:
    (run / name).write_text((run / name).read_text() + text)
