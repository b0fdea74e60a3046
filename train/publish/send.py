"""Sending the files of a run to the Hub, in one commit."""

from fnmatch import fnmatch

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

from skipdecode import ConfigError
from skipdecode.errors import first_line
from train.publish.parcel import Parcel

# Files of an earlier version of the repository that are deleted if the new one lacks them, because they would be
# loaded.
REPLACED = ("*.safetensors", "*.safetensors.index.json", "custom_generate/*")


def send(parcel: Parcel, *, public: bool = False, tag: str | None = None, message: str | None = None) -> str:
    """Send the files in one commit; an interrupted upload changes nothing, and files on the Hub aren't sent again.

    Args:
        parcel: the files, from `pack`.
        public: whether a new repository is public. An existing one keeps its visibility; sending to a public one
            without this is an error.
        tag: tag of the commit.
        message: message of the commit.

    Returns:
        The URL of the commit.

    Raises:
        ConfigError: where the Hub refuses, the tag belongs to another commit, or the repository is unexpectedly public.
    """
    api = HfApi()
    name = parcel.repository
    try:
        _make_repository(api, name, public)
        old = [file for file in api.list_repo_files(name) if any(fnmatch(file, pattern) for pattern in REPLACED)]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(file) for file in old if file not in parcel.contents
        ]
        operations += [CommitOperationAdd(file, content) for file, content in parcel.contents.items()]
        commit = api.create_commit(name, operations, commit_message=message or "Checkpoint with its schedules")
        if tag is not None:
            _tag(api, name, tag, commit.oid)
    except HfHubHTTPError as error:
        raise ConfigError(f"the Hub refused {name}: {first_line(error)}") from error
    except (OSError, RuntimeError, HTTPError) as error:  # HTTPError: there is no network
        raise ConfigError(f"sending to {name} failed ({first_line(error)}): run the same command again") from error
    return str(commit.commit_url)


def _make_repository(api: HfApi, name: str, public: bool) -> None:
    try:
        private = api.repo_info(name).private
    except RepositoryNotFoundError:
        api.create_repo(name, private=not public, exist_ok=True)
        return
    if not private and not public:
        raise ConfigError(f"{name} exists and is public: pass --public (publish.public=true), or choose another name")


def _tag(api: HfApi, name: str, tag: str, commit: str) -> None:
    tagged = {ref.name: ref.target_commit for ref in api.list_repo_refs(name).tags}
    if tag not in tagged:
        api.create_tag(name, tag=tag, revision=commit)
    elif tagged[tag] != commit:
        raise ConfigError(
            f"the tag {tag!r} of {name} belongs to commit {tagged[tag][:8]}: the files were sent, but choose a new tag"
        )
