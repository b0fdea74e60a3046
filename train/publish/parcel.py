"""The files of a finished run that are published: its checked checkpoint and nothing else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from omegaconf import OmegaConf
from PIL import Image

from configs.files import read_yaml
from eval.card import CARD, MARK, write_card
from eval.results import FILE_NAME, Report
from skipdecode import ConfigError
from skipdecode.checkpoint.checksums import CHECKSUMS_FILE, checked_files, checksums_text
from skipdecode.checkpoint.loading import load
from skipdecode.checkpoint.remote_code import FOLDER as CUSTOM_GENERATE
from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.errors import first_line
from train.publish.leaks import find_path, find_secret, without_paths
from train.recipe import Recipe, load_recipe

# All files that are ever sent: those that load the model, the card and the evaluation. The optimiser's state, the
# tracker's files and intermediate checkpoints are never sent, nor are predictions, which may quote a private data set.
SENT = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*.safetensors"),
    *("model.safetensors.index.json", "custom_generate/*.py", CARD, "recipe.yaml", "schedules.png"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
    *("eval/report.json", "eval/report.md", "eval/frontier.png"),
)
# Files with a vocabulary, whose words may look like secrets or paths.
_VOCABULARIES = ("tokenizer.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class Parcel:
    """The files that will be sent.

    Attributes:
        folder: the checkpoint's folder.
        repository: the Hub repository.
        contents: for each name in the repository, the content, or for weights the file. Contents may differ from the
            folder's: local paths are made relative, and the checksums are those of what is sent.
    """

    folder: Path
    repository: str
    contents: Mapping[str, bytes | Path]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.contents.items()
        }


def check_name(repository: str) -> None:
    """Raises ConfigError for a repository name that the Hub rejects, or that has no owner."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} isn't a valid repository name: {first_line(error)}") from error
    if "/" not in repository:
        raise ConfigError(f"repository {repository!r} has no owner: expected OWNER/NAME, such as me/my-model")


def check_publish(recipe: Recipe) -> None:
    """Raises ConfigError where a recipe requests publishing of a checkpoint that can't be published."""
    if recipe.publish.repository is not None:
        check_name(recipe.publish.repository)
        if recipe.lora.r is not None and not recipe.lora.merge:
            raise ConfigError("publish.repository needs merged adapters: lora.merge is false")
        if recipe.model.trust_remote_code:
            raise ConfigError("publish.repository needs a checkpoint without code: model.trust_remote_code is true")


def pack(folder: Path, repository: str) -> Parcel:
    """Check a checkpoint's folder, write its card and its `custom_generate`, and collect the files to send.

    Raises ConfigError for an invalid repository name; for missing or damaged weights, tokenizer or schedules; for a
    symbolic link; and for a file that seems to contain a secret.
    """
    check_name(repository)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds unmerged adapters: train with lora.merge=true to publish a checkpoint")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} isn't a finished run: it has no config.json")
    load(str(folder))
    write_card(folder, repository)
    load_recipe(str(folder / "recipe.yaml"), of_a_run=True)  # raises if others couldn't run it
    write_custom_generate(folder)
    files = sorted({path.relative_to(folder).as_posix() for pattern in SENT for path in folder.glob(pattern)})
    unsent = [file.name for file in folder.glob("*.safetensors") if file.name not in files]
    if unsent:
        raise ConfigError(
            f"{folder / unsent[0]} would not be sent: only model.safetensors and model-*.safetensors are; move it away"
        )
    contents: dict[str, bytes | Path] = {name: _content(folder, name) for name in files}
    checked = {name: content for name, content in contents.items() if (folder / name) in checked_files(folder)}
    contents[CHECKSUMS_FILE] = checksums_text(checked).encode()
    return Parcel(folder, repository, contents)


def _content(folder: Path, name: str) -> bytes | Path:
    """The content to send for a file. Raises ConfigError for what must not be sent."""
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise ConfigError(f"{path} is a symbolic link to {path.resolve()}: replace it with the file to send it")
    if name.startswith(f"{CUSTOM_GENERATE}/"):
        return path.read_bytes()  # written by this package just before
    if path.suffix == ".safetensors":
        with path.open("rb") as stream:  # 8 bytes with the header's length, then the header with names and metadata
            text = stream.read(int.from_bytes(stream.read(8), "little")).decode("utf-8", errors="replace")
    else:
        raw = path.read_bytes()
        # Of a picture only the metadata is checked, because pixels may look like anything.
        text = _metadata(path) if path.suffix == ".png" else raw.decode("utf-8", errors="replace")
    secret = find_secret(text, name if name not in _VOCABULARIES else None)
    if secret is not None:
        raise ConfigError(f"{path} seems to contain {secret}: nothing was sent; remove it first")
    if name not in _VOCABULARIES and find_path(text) is not None:
        text = _relative(path, text)
        raw = text.encode()
        if find_path(text) is not None:
            raise ConfigError(f"{path} contains the local path {find_path(text)}: nothing was sent; remove it first")
    return path if path.suffix == ".safetensors" else raw


def _metadata(path: Path) -> str:
    """The text metadata of a PNG. Raises ConfigError for another kind of file."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            picture.load()  # metadata may come after the pixels
            return "\n".join(f"{key}: {value}" for key, value in picture.info.items())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} isn't a PNG file: {first_line(error)}") from error


def _relative(path: Path, text: str) -> str:
    """The contents of a file written by training or evaluation, with local paths made relative."""
    if path.suffix == ".json":
        return json.dumps(without_paths(json.loads(text)), indent=2, ensure_ascii=False) + "\n"
    if path.suffix == ".yaml":
        return OmegaConf.to_yaml(OmegaConf.create(without_paths(read_yaml(path))))
    if path.name == CARD and MARK in text:  # a card that the user wrote stays as it is
        return str(without_paths(text))
    if path.name == "report.md":
        return Report.of(without_paths(json.loads(path.with_name(FILE_NAME).read_text(encoding="utf-8")))).to_markdown()
    return text


def describe(parcel: Parcel) -> Sequence[str]:
    """One line for each file to send, with its size in bytes."""
    lines = [f"{size:>14,}  {name}" for name, size in parcel.sizes.items()]
    return [*lines, f"{sum(parcel.sizes.values()):>14,}  bytes in all, to {parcel.repository}"]
