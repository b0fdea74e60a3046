"""The parcel that is sent of a finished run: its checkpoint, checked, and nothing else."""

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

# All that is ever sent: what loads the model, what says what it is, and how well it does. Not the optimiser's state,
# the tracker's files or checkpoints within the run; not predictions, which may quote a data set that isn't ours.
SENT = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*.safetensors"),
    *("model.safetensors.index.json", "custom_generate/*.py", CARD, "recipe.yaml", "schedules.png"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja"),
    *("eval/report.json", "eval/report.md", "eval/frontier.png"),
)
# Their words are the vocabulary's, and look like anything.
_VOCABULARIES = ("tokenizer.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class Parcel:
    """The files that will be sent.

    Attributes:
        folder: the checkpoint's.
        repository: where to.
        contents: name there -> the content, or of weights the file. Not all is as the folder has it: paths of this
            machine are relative, and the checksums are of what is sent.
    """

    folder: Path
    repository: str
    contents: Mapping[str, bytes | Path]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.contents.items()
        }


def check_name(repository: str) -> None:
    """Raises ConfigError for a name that the Hub doesn't take, or one without an owner."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} is no name of a repository: {first_line(error)}") from error
    if "/" not in repository:
        raise ConfigError(f"{repository!r} names no owner: expected OWNER/NAME, such as me/my-model")


def check_publish(recipe: Recipe) -> None:
    """Raises ConfigError where what a recipe trains can't be published as it says."""
    if recipe.publish.repository is not None:
        check_name(recipe.publish.repository)
        if recipe.lora.r is not None and not recipe.lora.merge:
            raise ConfigError("publish.repository wants a whole checkpoint: lora.merge=false keeps adapters apart")
        if recipe.model.trust_remote_code:
            raise ConfigError("publish.repository wants a checkpoint without code: model.trust_remote_code is true")


def pack(folder: Path, repository: str) -> Parcel:
    """Check a checkpoint's folder, write its card and its `custom_generate`, and gather what will be sent.

    Raises ConfigError for a name that the Hub doesn't take; where weights, tokenizer or schedules are missing or
    damaged; and for a link, and a file with something in it that looks like a secret.
    """
    check_name(repository)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds adapters apart: train with lora.merge=true to publish a whole checkpoint")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is no finished run: it has no config.json")
    load(str(folder))
    write_card(folder, repository)
    load_recipe(str(folder / "recipe.yaml"), of_a_run=True)  # which is sent for others to run
    write_custom_generate(folder)
    files = sorted({path.relative_to(folder).as_posix() for pattern in SENT for path in folder.glob(pattern)})
    unsent = [file.name for file in folder.glob("*.safetensors") if file.name not in files]
    if unsent:
        raise ConfigError(f"{folder / unsent[0]} has no name that is sent (model-*.safetensors): take it away")
    contents: dict[str, bytes | Path] = {name: _content(folder, name) for name in files}
    checked = {name: content for name, content in contents.items() if (folder / name) in checked_files(folder)}
    contents[CHECKSUMS_FILE] = checksums_text(checked).encode()
    return Parcel(folder, repository, contents)


def _content(folder: Path, name: str) -> bytes | Path:
    """The content that is sent of a file. Raises ConfigError for what should not be sent."""
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        raise ConfigError(f"{path} is a link to {path.resolve()}: put the file itself there to send it")
    if name.startswith(f"{CUSTOM_GENERATE}/"):
        return path.read_bytes()  # this package's own, just written
    if path.suffix == ".safetensors":
        with path.open("rb") as stream:  # names and metadata, behind their length in 8 bytes
            text = stream.read(int.from_bytes(stream.read(8), "little")).decode("utf-8", errors="replace")
    else:
        raw = path.read_bytes()
        # A picture's pixels may read like anything, so its texts alone are looked at.
        text = _texts(path) if path.suffix == ".png" else raw.decode("utf-8", errors="replace")
    secret = find_secret(text, name if name not in _VOCABULARIES else None)
    if secret is not None:
        raise ConfigError(f"{path} holds what looks like {secret}: nothing was sent; take it out first")
    if name not in _VOCABULARIES and find_path(text) is not None:
        text = _relative(path, text)
        raw = text.encode()
        if find_path(text) is not None:
            raise ConfigError(f"{path} names {find_path(text)}, a path of this machine: nothing was sent; take it out")
    return path if path.suffix == ".safetensors" else raw


def _texts(path: Path) -> str:
    """The metadata of a PNG. Raises ConfigError for what is none."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            picture.load()  # texts may stand behind the pixels
            return "\n".join(f"{key}: {value}" for key, value in picture.info.items())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is no PNG: {first_line(error)}") from error


def _relative(path: Path, text: str) -> str:
    """The text of a file that training and evaluation write, with the paths of this machine made relative."""
    if path.suffix == ".json":
        return json.dumps(without_paths(json.loads(text)), indent=2, ensure_ascii=False) + "\n"
    if path.suffix == ".yaml":
        return OmegaConf.to_yaml(OmegaConf.create(without_paths(read_yaml(path))))
    if path.name == CARD and MARK in text:  # a card that somebody wrote stays as it is
        return str(without_paths(text))
    if path.name == "report.md":
        return Report.of(without_paths(json.loads(path.with_name(FILE_NAME).read_text(encoding="utf-8")))).to_markdown()
    return text


def describe(parcel: Parcel) -> Sequence[str]:
    """A line for each file that will be sent, with its size."""
    lines = [f"{size:>14,}  {name}" for name, size in parcel.sizes.items()]
    return [*lines, f"{sum(parcel.sizes.values()):>14,}  bytes in all, to {parcel.repository}"]
