"""The end of a run: its finished checkpoint, which knows how long its texts are."""

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
from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.checkpoint.skip_config import SkipConfig, save_default_speedup
from skipdecode.cli.device import resolve_device
from skipdecode.errors import first_line
from skipdecode.families import decoder_layers, longest_sequence
from skipdecode.generate.fast_path import fast_path
from skipdecode.schedule.lengths import LengthsByPrompt
from train.adapters import merge_adapters
from train.base_settings import settle_generation
from train.build import build_model
from train.checkpoints import PARTIAL, stopped_if_unwritten
from train.evaluation import release_memory
from train.recipe import Recipe
from train.sampling import default_speedup

ROWS = 64  # that are decoded together


def finish(
    recipe: Recipe,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset,
    folder: Path,
    console: Console,
) -> None:
    """Move what was saved below `folder` into it; its config file, the mark of a finished run, comes last."""
    partial = folder / PARTIAL
    most = recipe.evaluation.max_new_tokens or task.max_new_tokens
    with stopped_if_unwritten("the finished checkpoint", folder):
        (partial / "training_args.bin").unlink(missing_ok=True)  # pickled; recipe.yaml says it all
        if recipe.lora.r is not None and recipe.lora.merge:
            base, _ = build_model(recipe, [], tokenizer)
            settle_generation(recipe, base, tokenizer)
            merge_adapters(base, partial)
            del base
        if (partial / "config.json").exists():  # not adapters apart
            write_custom_generate(partial)
            _limit_new_tokens(partial, most)
            config = SkipConfig.load(partial)
            assert config is not None  # the trainer saves it
            save_default_speedup(partial, default_speedup(recipe.schedule.default_speedup, config.schedules))
    texts, count = None, recipe.schedule.texts
    if count:
        lengths, _ = row_lengths(rows)  # of rows that may be more than fit into memory
        prompts = [rows[n]["prompt_ids"] for n in spread_over_lengths(lengths.tolist(), count)]
        texts = measure_texts(partial, prompts, most, console, trust_remote_code=recipe.model.trust_remote_code)
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


def measure_texts(
    folder: Path,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    console: Console,
    *,
    trust_remote_code: bool = False,
) -> LengthsByPrompt | None:
    """How long the texts are that a checkpoint writes behind prompts, token ids, at the slowest speed that was trained.

    Full depth's are noise where it wasn't among those. None, which is said, where the memory doesn't suffice.
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
            for start in progress.track(range(0, len(prompts), ROWS), description="lengths of its texts"):
                batch = prompts[start : start + ROWS]
                room = positions - max(map(len, batch)) + 1
                found = system.decode(batch, min(max_new_tokens, room)).lengths
                pairs += [(len(ids), length) for ids, length in zip(batch, found, strict=True)]
    except (MemoryError, torch.OutOfMemoryError) as error:
        console.print(
            f"the lengths of its texts are unknown: decoding {ROWS} at once took too much memory "
            f"({first_line(error)}); its speeds are solved for texts as long as those of the training"
        )
        return None
    return LengthsByPrompt.of(pairs)


def _limit_new_tokens(folder: Path, most: int) -> None:
    """Set how much `generate` writes where its caller doesn't say: else transformers stops after 20 tokens."""
    config = GenerationConfig.from_pretrained(folder)
    config.max_new_tokens = most
    config.save_pretrained(folder)
