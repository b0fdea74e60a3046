"""Sending a finished run's checkpoint to the Hub: what of it, checked, and nothing else."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils._validators import validate_repo_id
from safetensors import SafetensorError, safe_open

from skipdecode import ConfigError
from skipdecode.bundle import write_custom_generate
from skipdecode.errors import first_line
from skipdecode.loading import load_tokenizer
from train.card import CARD, write_card

# All that is ever sent: what loads the model, what says what it is, and how well it does. Not the optimiser's state,
# the tracker's files or checkpoints within the run; not predictions, which may quote a data set that isn't ours.
SENT = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*.safetensors"),
    *("model.safetensors.index.json", "custom_generate/generate.py", CARD, "recipe.yaml", "schedules.png"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
    *("eval/report.json", "eval/report.md", "eval/frontier.png"),
)
# What an earlier version of the repository may hold and this one not: left there, it would be loaded.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "custom_generate/*"]
_SECRETS = {
    "a token of the Hub": re.compile(r"\bhf_[A-Za-z0-9]{30,}\b"),
    "a key of Weights & Biases": re.compile(r"(?i)(?:wandb|api)[-_]?(?:api)?[-_]?key\W{1,4}[0-9a-f]{40}\b"),
    "a key of a cloud": re.compile(r"\b(?:AKIA[0-9A-Z]{16}|ghp_[A-Za-z0-9]{36})\b"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}


@dataclass(frozen=True)
class Parcel:
    """What will be sent.

    Attributes:
        folder: the checkpoint's.
        repository: where to.
        files: relative to the folder, as they will be called there.
        bytes: of all.
    """

    folder: Path
    repository: str
    files: tuple[str, ...]
    bytes: int


def check_name(repository: str) -> None:
    """Raises ConfigError for a name that the Hub doesn't take, or one without an owner."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} is no name of a repository: {first_line(error)}") from error
    if "/" not in repository:
        raise ConfigError(f"{repository!r} names no owner: expected OWNER/NAME, such as me/my-model")


def pack(folder: Path, repository: str) -> Parcel:
    """Check a checkpoint's folder, write its card and its `custom_generate`, and list what will be sent.

    Raises ConfigError for a name that the Hub doesn't take; where weights, tokenizer or schedules are missing or
    damaged; and for a file with something in it that looks like a secret.
    """
    check_name(repository)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds adapters apart: train with lora.merge=true to publish a whole checkpoint")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is no finished run: it has no config.json")
    _check_weights(folder)
    load_tokenizer(str(folder))
    write_custom_generate(folder)
    write_card(folder, repository)
    files = sorted({path.relative_to(folder).as_posix() for pattern in SENT for path in folder.glob(pattern)})
    for name in files:
        _check_secrets(folder / name)
    return Parcel(folder, repository, tuple(files), sum((folder / name).stat().st_size for name in files))


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged ({type(error).__name__}: {error})") from error
    for name in names:
        try:
            with safe_open(folder / name, "pt") as weights:
                empty = not list(weights.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder / name} can't be read: {first_line(error)}") from error
        if empty:
            raise ConfigError(f"{folder / name} holds no weights")


def _check_secrets(path: Path) -> None:
    if path.suffix in (".safetensors", ".png", ".model"):
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for what, pattern in _SECRETS.items():
        if pattern.search(text):
            raise ConfigError(f"{path} holds what looks like {what}: nothing was sent; take it out first")


def send(parcel: Parcel, *, public: bool = False, tag: str | None = None, message: str | None = None) -> str:
    """Send it, in one commit: what was interrupted has changed nothing, and what is there already isn't sent again.

    Args:
        parcel: of `pack`.
        public: whether a new repository may be seen by all; one that exists is left as it is, and refused where it is
            public and this says otherwise.
        tag: for the commit.
        message: of the commit.

    Returns:
        The commit's address.

    Raises:
        ConfigError: where the Hub refuses, the tag is that of another commit, or the repository is public against the
            request.
    """
    api = HfApi()
    name = parcel.repository
    try:
        _make_repository(api, name, public)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=parcel.folder,
            allow_patterns=list(parcel.files),
            delete_patterns=REPLACED,
            commit_message=message or "Checkpoint with its schedules",
        )
        if tag is not None:
            _tag(api, name, tag, commit.oid)
    except HfHubHTTPError as error:
        raise ConfigError(f"the Hub refused {name}: {first_line(error)}") from error
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"sending to {name} broke off ({first_line(error)}): the same command goes on") from error
    return str(commit.commit_url)


def _make_repository(api: HfApi, name: str, public: bool) -> None:
    try:
        private = api.repo_info(name).private
    except RepositoryNotFoundError:
        api.create_repo(name, private=not public, exist_ok=True)
        return
    if not private and not public:
        raise ConfigError(f"{name} exists and is public: say --public, or choose another name")


def _tag(api: HfApi, name: str, tag: str, commit: str) -> None:
    tagged = {ref.name: ref.target_commit for ref in api.list_repo_refs(name).tags}
    if tag not in tagged:
        api.create_tag(name, tag=tag, revision=commit)
    elif tagged[tag] != commit:
        raise ConfigError(
            f"the tag {tag!r} of {name} is that of commit {tagged[tag][:8]}: the files are there, choose a new tag"
        )


def describe(parcel: Parcel) -> Sequence[str]:
    """What will be sent, a line each."""
    lines = [f"{(parcel.folder / name).stat().st_size:>14,}  {name}" for name in parcel.files]
    return [*lines, f"{parcel.bytes:>14,}  bytes in all, to {parcel.repository}"]
