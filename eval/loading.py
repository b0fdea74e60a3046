"""Load and check the models and prompts of an evaluation, and identify them for the journal."""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import DistributedConfig

from data import Example, Task, load_task
from data.batches import Prompt
from data.options import task_options_of
from eval.decoding import encode_test_set
from eval.difference import difference
from eval.machine import machine_identity, versions
from eval.processes import ALONE, Processes
from eval.request import Request
from eval.systems.base import Checkpoint
from eval.systems.threshold import PROMPTS
from skipdecode import ConfigError, SkipSchedule
from skipdecode.checkpoint.checksums import checked_files, checksum
from skipdecode.checkpoint.from_gguf import find_gguf
from skipdecode.checkpoint.loading import adapted_checkpoint, downloaded, load
from skipdecode.checkpoint.offline import without_network
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.generate.skip_generate import check_mode
from skipdecode.training.layer_order import read_order

DEFAULT_SPEEDUPS = (1.0, 2.0, 3.0, 4.0)
MAX_SPEEDUPS = 5  # trained speedups up to this number are all evaluated by default


@dataclass(frozen=True)
class Loaded:
    """Models and prompts of an evaluation.

    Attributes:
        checkpoint: the model under test.
        reference: the baseline of all speeds; None for the checkpoint at full depth.
        config: the SkipConfig of the checkpoint, or a default.
        speedups: the requested targets; by default those that the checkpoint was trained for (full depth only if there
            are none), and for an exported checkpoint its single speedup.
        task: the task of the examples.
        examples: the test set.
        prompts: the encoded prompts of `examples`.
        validation: token ids of validation prompts; empty unless thresholds are calibrated.
        max_new_tokens: the maximum number of generated tokens per prompt.
        schedules: names and schedules of the user's files.
        order: the order of layers that drafts of `--lossless auto` use; None: as trained.
    """

    checkpoint: Checkpoint
    reference: Checkpoint | None
    config: SkipConfig
    speedups: tuple[float, ...]
    task: Task
    examples: list[Example]
    prompts: list[Prompt]
    validation: list[list[int]]
    max_new_tokens: int
    schedules: list[tuple[str, SkipSchedule]]
    order: tuple[int, ...] | None = None

    @property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of the test set's prompts."""
        return [prompt.ids for prompt in self.prompts]


def load_request(request: Request, processes: Processes = ALONE) -> Loaded:
    """Load the models and data of a request. Raises ConfigError where something is missing or inconsistent."""
    device = None if request.device_map is not None else processes.device(request.device)
    placed: dict[str, Any] = {}
    if request.device_map is not None:
        if processes.count > 1:
            raise ConfigError(
                "--device-map spreads one model over all devices: start a single process, without torchrun"
            )
        placed = {"device_map": request.device_map}
    elif request.tensor_parallel:
        placed = {"distributed_config": DistributedConfig(tp_size=processes.count)}

    def load_named(name: str, gguf_file: str | None = None) -> Checkpoint:
        options: dict[str, Any] = {"gguf_file": gguf_file, "trust_remote_code": request.trust_remote_code, **placed}
        return load_checkpoint(name, request.dtype, device, **options)

    checkpoint = load_named(request.checkpoint, request.gguf_file)
    reference = load_named(request.reference) if request.reference is not None else None
    config = SkipConfig.of(checkpoint.model.config)
    name, options = task_options(request.task, config, request.task_options)
    task = load_task(name, path=request.data_dir, **options)
    examples = list(islice(task.stream(request.split), request.limit))
    speedups = evaluated_speedups(request, config)
    validation = []
    if request.system == "calm" and any(speedup > 1 for speedup in speedups) and not request.calm_thresholds:
        validation = validation_examples(
            task, PROMPTS, "--system calm calibrates thresholds on it; or give thresholds with --calm-threshold"
        )
    max_new_tokens = request.max_new_tokens or task.max_new_tokens
    limit = remembered(config, name).get("max_prompt_tokens", task.max_prompt_tokens)

    def encode(by: Checkpoint, examples: Sequence[Example]) -> list[Prompt]:
        limits = {"max_prompt_tokens": limit, "max_new_tokens": max_new_tokens}
        return encode_test_set(by.model, by.tokenizer, examples, **limits)

    prompts = encode(checkpoint, examples)
    if reference is not None:
        _check_same_dtype(checkpoint, reference)
        _check_same_tokenizer(checkpoint, reference)
        try:
            same = encode(reference, examples) == prompts
        except ConfigError as error:
            raise ConfigError(f"--reference {reference.name}: {error}") from error
        if not same:
            raise ConfigError(
                f"--reference {reference.name} truncates prompts to another length than --checkpoint "
                f"{checkpoint.name}: lower --max-new-tokens until both get the same prompts"
            )
    return Loaded(
        checkpoint=checkpoint,
        reference=reference,
        config=config or SkipConfig(solver={"horizon": task.horizon}),
        speedups=speedups,
        task=task,
        examples=examples,
        prompts=prompts,
        validation=[prompt.ids for prompt in encode(checkpoint, validation)],
        max_new_tokens=max_new_tokens,
        schedules=[(Path(file).stem, SkipSchedule.load(file)) for file in request.schedules],
        order=None if request.order is None else read_order(request.order, checkpoint.num_layers),
    )


def evaluated_speedups(request: Request, config: SkipConfig | None) -> tuple[float, ...]:
    """The targets of an evaluation. Raises ConfigError for targets that an exported checkpoint doesn't have."""
    exported = None if config is None else config.exported
    if exported is not None:
        if request.speedups not in ((), (exported,)):
            raise ConfigError(
                f"--speedup is {list(request.speedups)}: --checkpoint {request.checkpoint} was exported for "
                f"{exported:g}x and only decodes at that speed; leave --speedup out"
            )
        if request.system == "calm" and not request.calm_thresholds:
            raise ConfigError(
                f"--system calm: --checkpoint {request.checkpoint} was exported for {exported:g}x and has no other "
                "target to calibrate thresholds for; give thresholds with --calm-threshold"
            )
        return (exported,)
    if request.speedups or request.reference is not None or request.calm_thresholds:
        return request.speedups or (1.0,)
    trained, solver = (sorted(config.schedules), config.solver) if config is not None else ([], {})
    # A checkpoint trained with optim.exits=all can exit after every layer.
    exits = trained == [1] and (solver.get("placement"), solver.get("decay")) == ("bottom", "constant")
    if request.system == "calm" or exits:
        return DEFAULT_SPEEDUPS
    if len(trained) <= MAX_SPEEDUPS:
        return tuple(trained) or (1.0,)
    within = tuple(speedup for speedup in DEFAULT_SPEEDUPS if trained[0] <= speedup <= trained[-1])
    return within or (trained[0], trained[-1])


def identity(request: Request, loaded: Loaded, processes: Processes = ALONE) -> dict[str, Any]:
    """Everything that the outputs, scores and times of an evaluation depend on, as JSON values."""
    return {
        "checkpoint": checkpoint_identity(loaded.checkpoint),
        "reference": checkpoint_identity(loaded.reference) if loaded.reference is not None else None,
        "task": loaded.task.name,
        "task_options": list(request.task_options),
        "split": request.split,
        "test_set": fingerprint(
            [[e.id, e.references, p.ids] for e, p in zip(loaded.examples, loaded.prompts, strict=True)]
        ),
        "validation": fingerprint(loaded.validation),
        "system": request.system,
        "speedups": list(loaded.speedups),
        "over": request.over,
        "strict": request.strict,
        "schedules": {name: schedule.to_dict() for name, schedule in loaded.schedules},
        "lossless": list(request.lossless),
        "order": loaded.order and list(loaded.order),
        "agreement": request.agreement,
        "calm_thresholds": list(request.calm_thresholds),
        "limit": request.limit,
        "batch_size": request.batch_size,
        "time_batch_sizes": list(request.time_batch_sizes),
        "time_limit": request.time_limit,
        "max_new_tokens": loaded.max_new_tokens,
        "dtype": str(loaded.checkpoint.model.dtype),
        "weights": request.weights,
        "calibrate": request.calibrate,
        "processes": processes.count,
        "tensor_parallel": request.tensor_parallel,
        "device_map": request.device_map,
        "machine": machine_identity(loaded.checkpoint.model.device),
        "versions": versions(),
    }


def load_checkpoint(
    name: str,
    dtype: str | None,
    device: torch.device | None,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    **placed: Any,
) -> Checkpoint:
    """Load the model and tokenizer of a folder or a Hub name. Raises ConfigError where they can't be loaded.

    `gguf_file` names a GGUF file in it to read both from. `placed` holds `device_map` or `distributed_config` of
    transformers, which then decide the placement of the model.
    """
    try:
        model, tokenizer = load(
            name,
            getattr(torch, dtype) if dtype else None,
            gguf_file=gguf_file,
            trust_remote_code=trust_remote_code,
            **placed,
        )
    except ConfigError as error:
        if not placed:
            raise
        option = "--device-map" if "device_map" in placed else "--tensor-parallel"
        raise ConfigError(f"{option}: {error}") from error
    if getattr(model.generation_config, "stop_strings", None):
        raise ConfigError(
            f"the generation_config.json of {name} has stop_strings, but an evaluation ends sequences at the end token "
            "only: remove them"
        )
    try:
        check_mode(model.generation_config)
    except ConfigError as error:
        raise ConfigError(f"the generation_config.json of {name}: {error}") from error
    if not placed:
        model.to(device)  # type: ignore[arg-type]
    path = None if gguf_file is None else find_gguf(name, gguf_file)
    return Checkpoint(name, model, tokenizer, gguf_file=path)


def remembered(config: SkipConfig | None, task: str) -> Mapping[str, Any]:
    """The settings of a task saved in a checkpoint; empty where it was trained on another task."""
    return config.task if config is not None and config.task.get("name") == task else {}


def task_options(
    requested: str | None, config: SkipConfig | None, changes: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """The name and options of the requested task, by default the checkpoint's, with `changes` (key=value) applied.

    Raises ConfigError where no task is given, and for malformed changes.
    """
    name = requested or (config.task.get("name") if config is not None else None)
    if name is None:
        raise ConfigError("--task is missing: the checkpoint doesn't name the task that it was trained on")
    return name, {**remembered(config, name).get("options", {}), **task_options_of(changes)}


def validation_examples(task: Task, limit: int | None, advice: str) -> list[Example]:
    """The first `limit` validation examples. Raises ConfigError, with the advice, where there are none."""
    try:
        examples = list(islice(task.stream("validation"), limit))
    except ConfigError as error:
        raise ConfigError(f"no validation data: {error}; {advice}") from error
    if not examples:
        raise ConfigError(f"no validation data: the validation split of task {task.name!r} is empty; {advice}")
    return examples


def _check_same_dtype(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    one, other = (str(each.model.dtype).removeprefix("torch.") for each in (checkpoint, reference))
    if one != other:
        raise ConfigError(
            f"--reference {reference.name} is in {other} and --checkpoint {checkpoint.name} in {one}: their times "
            "aren't comparable; give one for both with --dtype"
        )


def _check_same_tokenizer(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    one, other = checkpoint.tokenizer, reference.tokenizer
    if one.get_vocab() != other.get_vocab() or one.eos_token_id != other.eos_token_id:
        raise ConfigError(
            f"--reference {reference.name} has another tokenizer ({len(other)} tokens, ending in {other.eos_token!r}) "
            f"than --checkpoint {checkpoint.name} ({len(one)} tokens, ending in {one.eos_token!r}): "
            "give a reference with the same tokenizer"
        )


def checkpoint_identity(checkpoint: Checkpoint, of_file: Callable[[Path], Any] | None = None) -> dict[str, Any]:
    """The `weights_identity` of a loaded checkpoint; for a GGUF file that of the file."""
    path = checkpoint.gguf_file
    if path is not None:
        return {path.name: (of_file or _size_and_time)(path)}
    return weights_identity(checkpoint.name, of_file)


def weights_identity(name: str, of_file: Callable[[Path], Any] | None = None) -> dict[str, Any]:
    """Values that identify the content of a checkpoint.

    For a folder, the size and modification time (or `of_file`) of each file that affects outputs; for a name on the
    Hub, the commit; for adapters, also the identity of their base model.
    """
    folder = Path(name)
    if folder.is_dir():
        files = [*checked_files(folder), *folder.glob("generation_config.json")]
        found: dict[str, Any] = {file.name: (of_file or _size_and_time)(file) for file in files}
    else:
        snapshot = _snapshot(name)
        found, folder = {"name": name, "commit": snapshot and snapshot.name}, snapshot or folder
    adapted = adapted_checkpoint(folder)
    return found if adapted is None else {**found, "base": weights_identity(adapted, of_file)}


def _size_and_time(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _snapshot(name: str) -> Path | None:
    """The cache folder of a repository, whose name is the commit; None where the repository isn't cached."""
    try:
        where = without_network(name)
    except ConfigError:
        return None
    files = (downloaded(name, file, where) for file in ("config.json", "adapter_config.json"))
    return next((file.parent for file in files if file is not None), None)


def check_same(loaded: Loaded, processes: Processes) -> None:
    """Raise ConfigError where a process has other weights, prompts or package versions than the first process.

    Processes on other machines read their own disks.
    """
    if processes.count == 1:
        return
    checkpoints = {"checkpoint": loaded.checkpoint, "reference": loaded.reference}
    mine = {
        **{key: checkpoint_identity(each, checksum) for key, each in checkpoints.items() if each is not None},
        "prompts": fingerprint(
            [[example.id, p.ids] for example, p in zip(loaded.examples, loaded.prompts, strict=True)]
        ),
        "dtype": str(loaded.checkpoint.model.dtype),
        "max_new_tokens": loaded.max_new_tokens,
        "versions": versions(),
    }
    (first, _), *others = processes.gather((mine, socket.gethostname()))
    for rank, (theirs, host) in enumerate(others, start=1):
        if theirs != first:
            raise ConfigError(
                f"process {rank} on {host} would evaluate something other than process 0: {difference(first, theirs)}"
            )


def fingerprint(values: Any) -> str:
    """A hash of JSON values."""
    return hashlib.sha256(json.dumps(values).encode("utf-8")).hexdigest()[:16]
