"""The estimated memory is the memory that a training process needs."""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import train.dry_run.memory
from skipdecode import ConfigError, SkipSchedule
from skipdecode.training.sampling import ScheduleSampler
from train.build import model_config
from train.dry_run.memory import MemoryEstimate, candidate_steps, estimate_memory
from train.dry_run.simulation import SimulatedStep, simulate_step
from train.recipe import Recipe, load_recipe

# Models that need several hundred megabytes, each dominated by another part of the estimate.
SHAPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "opt, weights and optimiser": (
        {"model_type": "opt", "hidden_size": 640, "word_embed_proj_dim": 640, "num_hidden_layers": 8}
        | {"num_attention_heads": 8, "ffn_dim": 2560, "max_position_embeddings": 256},
        ["train.per_device_batch_size=2"],
    ),
    "gpt2, activations": (
        {"model_type": "gpt2", "n_embd": 192, "n_layer": 6, "n_head": 6, "n_positions": 256},
        ["train.per_device_batch_size=32", "optim.label_smoothing=0.1"],
    ),
    "llama, checkpointed, accumulated, taught at full depth": (
        {"model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4}
        | {"num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 24000, "tie_word_embeddings": False},
        [
            *("train.per_device_batch_size=6", "train.gradient_checkpointing=true"),
            *("train.gradient_accumulation_steps=2", "schedule.sampling=sandwich"),
            *("schedule.speedups=[1,1.3]", "optim.distillation=0.5"),
        ],
    ),
}

FASTEST = "opt, weights and optimiser"

# All shapes run in one process, because its imports take longer than the steps; a small model first makes the imports
# of a training step. With MALLOC_MMAP_THRESHOLD_ every tensor is a mapping of its own, so that freed memory returns to
# the system at once, as it returns to the allocator on a GPU. The heaviest step comes first, so that few others are
# timed.
MEASURE = """
import gc, json, sys
from pathlib import Path
import train.dry_run.duration, train.dry_run.rehearsal
from train.dry_run.rehearsal import dry_run
from train.recipe import load_recipe

train.dry_run.duration.TIMED_STEPS = train.dry_run.rehearsal.ROUNDS = 1

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

dry_run(load_recipe("quickstart", ["data.options={train_size: 20}", "train.per_device_batch_size=2"]))
for overrides in json.loads(sys.argv[1]):
    recipe = load_recipe("quickstart", overrides)
    gc.collect()
    before = status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    found = dry_run(recipe)
    peak = status("VmHWM:") - before
    print(json.dumps({"peak": peak, "estimated": found.estimate.total}))
    del found
"""


@pytest.mark.parametrize(
    "kinds",
    [[FASTEST], pytest.param([kind for kind in SHAPES if kind != FASTEST], marks=pytest.mark.release)],
    ids=["fastest shape", "other shapes"],
)
def test_the_estimated_memory_is_within_10_percent_of_the_peak_of_a_training_process(
    kinds: list[str], tmp_path: Path
) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's account of a process's peak")
    overrides = []
    for number, (shape, changes) in enumerate(SHAPES[kind] for kind in kinds):
        (tmp_path / f"{number}.yaml").write_text(json.dumps(shape))
        own = [f"model.shape={tmp_path / f'{number}.yaml'}", f"output.dir={tmp_path / 'out'}"]
        overrides.append([*own, "model.config=null", "data.options={train_size: 40}", *changes])
    command = [sys.executable, "-c", MEASURE, json.dumps(overrides)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    for kind, figures in zip(kinds, lines, strict=True):
        print(kind, {name: f"{value / 2**20:.0f} MiB" for name, value in figures.items()})
        assert figures["peak"] > 200 * 2**20, "too small to tell"
        assert figures["estimated"] == pytest.approx(figures["peak"], rel=0.1), kind


def small_recipe(*overrides: str) -> Recipe:
    """The quickstart recipe with 8 layers and batches of 2 rows."""
    return load_recipe("quickstart", ["train.per_device_batch_size=2", "model.config.num_hidden_layers=8", *overrides])


def simulated(recipe: Recipe, schedule: SkipSchedule | None = None) -> SimulatedStep:
    config = model_config(recipe)
    schedule = schedule or SkipSchedule.full_depth(config.num_hidden_layers, 8)
    return simulate_step(recipe, config, [schedule], prompt_columns=12, new_tokens=8)


def test_opt_6_7b_is_simulated_in_seconds_and_without_allocating_its_weights() -> None:
    recipe = small_recipe("model.shape=opt-6.7b", "model.config.num_hidden_layers=32", "train.precision=bf16")
    started = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = simulated(recipe)
    assert time.process_time() - started < 30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30
    assert 6.4e9 < step.parameters < 6.8e9


def test_with_adapters_only_their_weights_have_gradients() -> None:
    """LoRA of rank r on the queries and values of a square layer: 2 · 2 · r · hidden values."""
    recipe, whole_recipe = small_recipe("lora.r=4", "model.dtype=bfloat16"), small_recipe("model.dtype=bfloat16")
    step, whole = simulated(recipe), simulated(whole_recipe)
    model = AutoModelForCausalLM.from_config(model_config(recipe))
    assert whole.parameters == whole.trainable == sum(parameter.numel() for parameter in model.parameters())
    assert step.trainable == 8 * 2 * 2 * 4 * 128
    assert step.parameters == whole.parameters + step.trainable
    assert step.weights == 2 * whole.parameters + 4 * step.trainable  # the adapters are float32
    assert estimate_memory(recipe, step).optimiser == 8 * step.trainable
    assert estimate_memory(recipe, step).total < estimate_memory(whole_recipe, whole).total


def test_checkpointing_smaller_budgets_and_smaller_batches_reduce_the_estimate() -> None:
    narrow = SkipSchedule(8, 2, 1, horizon=8, prompt="max")
    full = simulated(small_recipe()).peak(0)
    assert simulated(small_recipe("train.gradient_checkpointing=true")).peak(0) < 0.7 * full
    assert simulated(small_recipe(), narrow).peak(0) < 0.7 * full
    assert simulated(small_recipe("train.per_device_batch_size=1")).peak(0) < 0.6 * full


def test_the_candidates_for_the_heaviest_step_are_the_slowest_schedules() -> None:
    two, six, four = (SkipSchedule(8, layers, layers // 2, horizon=8) for layers in (2, 6, 4))
    schedules = (two, SkipSchedule.full_depth(8, 8), six, four)
    sampler = ScheduleSampler((4.0, 1.0, 1.5, 2.0), schedules, (1.0, 1.0, 0.0, 1.0), 0)

    def speedups(sampler: ScheduleSampler, distils: bool) -> list[list[float]]:
        return [[draw.speedup for draw in each.at(7)] for each in candidate_steps(sampler, distils)]

    assert speedups(sampler, False) == [[1.0]]
    assert speedups(sampler, True) == [[1.0], [2.0]]
    assert speedups(replace(sampler, sampling="sandwich"), True) == [[1.0, 2.0, 4.0]]
    assert speedups(ScheduleSampler((3.0,), schedules[:1], (1.0,), 0, "sandwich"), False) == [[3.0]]


# 1,000 trained values in bfloat16, each with 2 bytes of weights, 2 of gradients and 12 of optimiser state; the
# optimiser also holds gradients in float32 (4 bytes). While half of the gradients exist, other tensors take 3,000
# bytes.
STEP = SimulatedStep(1000, 1000, weights=2000, gradients=2000, peaks={0: 100, 1000: 3000, 2000: 100})


@pytest.mark.parametrize(
    ("config", "processes", "expected"),
    [
        ("null", 1, MemoryEstimate(2000, 4000, 3000 + 1000)),
        ("null", 4, MemoryEstimate(2000, 4000, 3000 + 1000 + 2000)),  # gradients twice
        ("zero1", 4, MemoryEstimate(2000, 3000, 3000 + 1000)),
        ("zero2", 4, MemoryEstimate(2000, 3000, 3000 + 250)),
        ("zero2-offload", 4, MemoryEstimate(2000, 0, 3000, host=16000)),
        ("zero3", 4, MemoryEstimate(500 + 200, 3000, 3000 + 250)),
        ("zero3", 1, MemoryEstimate(2000, 12000, 2000 + 4000)),
        ("zero3-offload", 4, MemoryEstimate(200, 0, 3000, host=18000)),
    ],
)
def test_each_zero_stage_shards_its_parts_of_the_memory(
    config: str, processes: int, expected: MemoryEstimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.dry_run.memory, "LIVE_PARAMETERS", 100)
    found = estimate_memory(small_recipe(f"deepspeed.config={config}"), STEP, processes)
    assert found == expected
    assert found.total == found.weights + found.optimiser + found.step


def test_an_offload_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}')
    with pytest.raises(ConfigError, match="offload_optimizer is 'cpu', expected an object with a device"):
        estimate_memory(small_recipe(f"deepspeed.config={tmp_path / 'zero.json'}"), STEP)
