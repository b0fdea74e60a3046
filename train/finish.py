"""The end of a run: its finished checkpoint, with measured lengths of the sequences that it generates."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import GenerationConfig, PreTrainedTokenizerBase

from data import Task
from data.rows import row_lengths
from eval.decoding import spread_over_lengths
from eval.systems.base import Checkpoint, SkipSystem
from skipdecode import SkipSchedule
from skipdecode.checkpoint.checksums import write_checksums
from skipdecode.checkpoint.loading import load
from skipdecode.checkpoint.skip_config import SkipConfig
from skipdecode.cli.device import resolve_device
from skipdecode.errors import first_line
from skipdecode.families import decoder_layers, longest_sequence
from skipdecode.generate.fast_path import fast_path
from skipdecode.schedule.lengths import LengthsByPrompt
from skipdecode.training.saving import save_skip_files
from train.adapters import merge_adapters
from train.base_settings import settle_generation
from train.build import build_model
from train.checkpoints import PARTIAL, stopped_if_unwritten
from train.evaluation import release_memory
from train.recipe import Recipe

BATCH_SIZE = 64  # prompts decoded together to measure lengths


def finish(
    recipe: Recipe,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    folder: Path,
    console: Console,
) -> None:
    """Complete the checkpoint saved in the subfolder PARTIAL, and move it into `folder`.

    Its config file comes last, because it marks a finished run.
    """
    partial = folder / PARTIAL
    max_new_tokens = recipe.evaluation.max_new_tokens or task.max_new_tokens
    with stopped_if_unwritten("the finished checkpoint", folder):
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle, which recipe.yaml makes unnecessary
        if recipe.lora.r is not None and recipe.lora.merge:
            base, _ = build_model(recipe, [], tokenizer)
            settle_generation(recipe, base, tokenizer)
            merge_adapters(base, partial)
            del base
        if (partial / "config.json").exists():  # unmerged adapters have none
            _save_max_new_tokens(partial, max_new_tokens)
            config = SkipConfig.load(partial)
            assert config is not None  # the trainer saves it
            save_skip_files(partial, config, recipe.schedule.default_speedup)
    texts, count = None, recipe.schedule.texts
    if count:
        lengths, _ = row_lengths(rows)
        prompts = [rows[n]["prompt_ids"] for n in spread_over_lengths(lengths.tolist(), count)]
        texts = measure_lengths(
            partial, prompts, max_new_tokens, console, trust_remote_code=recipe.model.trust_remote_code
        )
    with stopped_if_unwritten("the finished checkpoint", folder):
        config = SkipConfig.load(partial)
        assert config is not None  # the trainer saves it
        replace(config, lengths_by_prompt=texts).save(partial)
        write_checksums(partial)
        for file in sorted(partial.iterdir(), key=lambda f: f.name in ("config.json", "adapter_config.json")):
            if file.is_dir():
                shutil.rmtree(folder / file.name, ignore_errors=True)
            os.replace(file, folder / file.name)
        partial.rmdir()


def measure_lengths(
    folder: Path,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    console: Console,
    *,
    trust_remote_code: bool = False,
) -> LengthsByPrompt | None:
    """Measure the lengths of the sequences that a checkpoint generates at the slowest trained speed.

    The slowest trained speed is used because a model that wasn't trained at full depth may write noise there.

    Args:
        folder: the checkpoint.
        prompts: token ids of each prompt.
        max_new_tokens: the longest sequence to generate.
        console: where progress and warnings are printed.
        trust_remote_code: whether the checkpoint's own code may run.

    Returns:
        Pairs of prompt and output length; None, with a warning, where memory is insufficient.
    """
    release_memory()
    pairs: list[tuple[int, int]] = []
    try:
        model, tokenizer = load(str(folder), trust_remote_code=trust_remote_code)
        model.to(resolve_device(None))  # type: ignore[arg-type]
        config = SkipConfig.load(folder) or SkipConfig()
        schedules = config.schedules or {1.0: SkipSchedule.full_depth(len(decoder_layers(model)))}
        checkpoint = Checkpoint(folder.name, model, tokenizer, fast_path(model).usual_weights())
        system = SkipSystem("slowest", checkpoint, schedules[min(schedules)])
        positions = longest_sequence(model.config) or 2**31
        with Progress(console=console, transient=True) as progress:
            for start in progress.track(range(0, len(prompts), BATCH_SIZE), description="measuring output lengths"):
                batch = prompts[start : start + BATCH_SIZE]
                available = positions - max(map(len, batch)) + 1
                found = system.decode(batch, min(max_new_tokens, available)).lengths
                pairs += [(len(ids), length) for ids, length in zip(batch, found, strict=True)]
    except (MemoryError, torch.OutOfMemoryError) as error:
        console.print(
            f"the checkpoint's output lengths couldn't be measured: decoding {BATCH_SIZE} prompts at once took too "
            f"much memory ({first_line(error)}); its schedules are solved for the lengths of the training completions"
        )
        return None
    return LengthsByPrompt.of(pairs)


def _save_max_new_tokens(folder: Path, max_new_tokens: int) -> None:
    """Set the default of `generate`, which would otherwise stop after transformers' 20 tokens."""
    config = GenerationConfig.from_pretrained(folder)
    config.max_new_tokens = max_new_tokens
    config.save_pretrained(folder)
