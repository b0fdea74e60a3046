"""The memory that is estimated is the memory that a training process takes."""

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

from skipdecode import ConfigError, SkipSchedule
from train.build import model_config
from train.dry_run.memory import Zero, costliest_steps, estimate_memory, simulate_recipe
from train.dry_run.simulation import Kernels, SimulatedStep
from train.recipe import Recipe, load_recipe
from train.sampling import ScheduleSampler

# Shapes of some hundred megabytes, each with another part that weighs most.
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
            "train.per_device_batch_size=6",
            "train.gradient_checkpointing=true",
            "train.gradient_accumulation_steps=2",
            "schedule.sampling=sandwich",
            "schedule.speedups=[1,1.3]",
            "optim.distillation=0.5",
        ],
    ),
}

# All shapes in one process, since its imports take longer than they do; what a training step alone imports comes with a
# small model. Freed memory returns to the system at once where each tensor is a mapping of its own
# (MALLOC_MMAP_THRESHOLD_), as it returns to the allocator on a GPU: the C library would keep some of it.
MEASURE = """
import gc, json, sys
from dataclasses import asdict
from pathlib import Path
from train.dry_run.rehearsal import dry_run
from train.recipe import load_recipe

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
    print(json.dumps({"peak": peak, "reported": found.measured_peak, **asdict(found.estimate)}))
    del found
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Of each shape: the bytes by which its training process grew at its peak, and those that were estimated."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's account of a process's peak")
    folder = tmp_path_factory.mktemp("shapes")
    overrides = []
    for number, (shape, changes) in enumerate(SHAPES.values()):
        (folder / f"{number}.yaml").write_text(json.dumps(shape))
        own = [f"model.shape={folder / f'{number}.yaml'}", f"output.dir={folder / 'out'}"]
        overrides.append([*own, "model.config=null", "data.options={train_size: 40}", *changes])
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(overrides)],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return dict(zip(SHAPES, lines, strict=True))


@pytest.mark.parametrize("kind", SHAPES)
def test_the_estimate_is_within_a_tenth_of_the_peak_of_a_real_training_process(
    kind: str, measured: dict[str, dict[str, int]]
) -> None:
    figures = measured[kind]
    print(kind, {name: f"{value / 2**20:.0f} MiB" for name, value in figures.items()})
    assert figures["peak"] > 200 * 2**20, "too small to tell"
    assert figures["total"] == pytest.approx(figures["peak"], rel=0.1)
    assert figures["reported"] == pytest.approx(figures["peak"], rel=0.1)


def small_recipe(*overrides: str) -> Recipe:
    """Of a shape of 8 layers, in batches of 2 rows."""
    return load_recipe("quickstart", ["train.per_device_batch_size=2", "model.config.num_hidden_layers=8", *overrides])


def simulated(recipe: Recipe, sampler: ScheduleSampler | None = None, kernels: Kernels = "cuda") -> SimulatedStep:
    depth = model_config(recipe).num_hidden_layers
    sampler = sampler or ScheduleSampler((1.0,), (SkipSchedule.full_depth(depth, 8),), (1.0,), 0)
    steps = costliest_steps(sampler, bool(recipe.optim.distillation))
    config = model_config(recipe)
    return simulate_recipe(recipe, config, steps, prompt_columns=12, new_tokens=8, kernels=kernels)


def test_weights_and_gradients_are_the_real_models_parameters() -> None:
    recipe = small_recipe()
    step = simulated(recipe)
    model = AutoModelForCausalLM.from_config(model_config(recipe))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert step.parameters == step.trainable == expected
    assert step.weights == step.gradients == 4 * expected
    estimate = estimate_memory(recipe, step)
    assert estimate.optimiser == 8 * expected
    assert estimate.total == 12 * expected + step.peak()
    assert max(step.gradients, step.activations) <= step.peak() <= step.gradients + step.activations


def test_the_peak_is_one_of_activations_and_gradients_at_the_same_moment() -> None:
    step = SimulatedStep(10, 10, 2, weights=40, gradients=40, peaks={0: 100, 20: 90, 40: 5})
    assert step.activations == 100
    assert step.peak() == 110
    assert step.peak(0.5) == 100
    assert step.peak(0) == 100


def test_opt_6_7b_is_simulated_in_seconds_without_its_27_gigabytes() -> None:
    recipe = small_recipe("model.shape=opt-6.7b", "model.config.num_hidden_layers=32", "train.precision=bf16")
    started = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = simulated(recipe)
    assert time.process_time() - started < 30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30
    assert 6.4e9 < step.parameters < 6.8e9


def test_adapters_alone_get_gradients() -> None:
    """LoRA of rank r on the queries and values of a square layer: 2 · 2 · r · hidden values."""
    recipe = small_recipe("lora.r=4", "lora.target_modules=[q_proj,v_proj]", "model.dtype=bfloat16")
    step, whole = simulated(recipe), simulated(small_recipe("model.dtype=bfloat16"))
    assert step.trainable == 8 * 2 * 2 * 4 * 128
    assert step.parameters == whole.parameters + step.trainable
    assert step.weights == 2 * whole.parameters + 4 * step.trainable  # the adapters are float32
    assert estimate_memory(recipe, step).optimiser == 8 * step.trainable
    assert estimate_memory(recipe, step).total < estimate_memory(recipe, whole).total


def test_checkpointing_a_narrow_schedule_and_small_batches_need_less() -> None:
    narrow = ScheduleSampler((3.0,), (SkipSchedule(8, 2, 1, horizon=8, prompt="max"),), (1.0,), 0)
    full = simulated(small_recipe()).activations
    assert simulated(small_recipe("train.gradient_checkpointing=true")).activations < 0.7 * full
    assert simulated(small_recipe(), narrow).activations < 0.7 * full
    assert simulated(small_recipe("train.per_device_batch_size=1")).activations < 0.6 * full


def test_a_sandwich_holds_one_pass_at_a_time_and_a_teacher_one_more_output() -> None:
    schedules = tuple(SkipSchedule(8, most, 1, horizon=8) for most in (7, 6, 5))
    one = ScheduleSampler((1.5, 2.0, 3.0), schedules, (1.0, 1.0, 1.0), 0)
    sandwich = replace(one, sampling="sandwich")
    recipe, distils = small_recipe(), small_recipe("optim.distillation=0.5")
    assert simulated(recipe, sandwich).activations < 1.1 * simulated(recipe, one).activations
    assert simulated(distils, one).activations > simulated(recipe, one).activations


def test_dropout_keeps_a_byte_a_value_on_cuda_and_four_on_the_cpu() -> None:
    recipe = small_recipe("model.config.dropout=0.1")
    plain, cuda, cpu = (
        simulated(r, kernels=k) for r, k in ((small_recipe(), "cuda"), (recipe, "cuda"), (recipe, "cpu"))
    )
    assert plain.activations < cuda.activations < cpu.activations


def test_the_costliest_steps_are_the_slowest_that_may_be_drawn() -> None:
    full = SkipSchedule.full_depth(8, 8)
    schedules = (
        SkipSchedule(8, 2, 1, horizon=8),
        full,
        SkipSchedule(8, 6, 3, horizon=8),
        SkipSchedule(8, 4, 2, horizon=8),
    )
    sampler = ScheduleSampler((4.0, 1.0, 1.5, 2.0), schedules, (1.0, 1.0, 0.0, 1.0), 0)

    def speedups(sampler: ScheduleSampler, distils: bool) -> list[list[float]]:
        return [[draw.speedup for draw in step] for step in costliest_steps(sampler, distils)]

    assert speedups(sampler, False) == [[1.0]]
    assert speedups(sampler, True) == [[1.0], [2.0]]
    sandwich = replace(sampler, sampling="sandwich")
    assert speedups(sandwich, True) == [[1.0, 2.0, 4.0]]
    assert [draw.speedup for draw in sandwich.at(0)] == [1.0, 2.0, 4.0]
    assert speedups(ScheduleSampler((3.0,), schedules[:1], (1.0,), 0, "sandwich"), False) == [[3.0]]


# 1,000 values of bfloat16, all trained, and buckets of 10 values: 2 bytes of weights, 2 of gradients, 12 of state each;
# the step of the optimiser holds float32 gradients (4) too. While gradients are half there, other tensors take 3,000.
STEP = SimulatedStep(1000, 1000, 2, weights=2000, gradients=2000, peaks={0: 100, 1000: 3000, 2000: 100})


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimiser", "total", "host"),
    [
        (Zero(1, reduce_bucket=10), 2000, 2020, 3000, 2000 + 3000 + 20 + 4000, 0),
        (Zero(2, reduce_bucket=10), 2000, 520, 3000, 2000 + 3000 + 20 + 3250, 0),
        (Zero(2, reduce_bucket=10, reduce_buckets=2), 2000, 540, 3000, 2000 + 3000 + 40 + 3250, 0),
        (Zero(2, reduce_bucket=None), 2000, 508, 3000, 2000 + 3000 + 8 + 3250, 0),
        (Zero(2, True, reduce_bucket=10), 2000, 20, 0, 2000 + 20 + 3000, 16000),
        (Zero(3, reduce_bucket=10, live_parameters=100), 700, 520, 3000, 700 + 3000 + 20 + 3250, 0),
        (Zero(3, True, True, reduce_bucket=10, live_parameters=100), 200, 20, 0, 200 + 20 + 3000, 18000),
    ],
)
def test_each_stage_divides_what_it_says(
    zero: Zero, weights: int, gradients: int, optimiser: int, total: int, host: int
) -> None:
    found = estimate_memory(small_recipe(), STEP, world_size=4, zero=zero)
    assert (found.weights, found.gradients, found.optimiser) == (weights, gradients, optimiser)
    assert (found.total, found.host) == (total, host)


def test_several_processes_hold_the_gradients_twice() -> None:
    alone, both = (estimate_memory(small_recipe(), STEP, world_size=n) for n in (1, 2))
    assert both.total == alone.total + STEP.gradients


@pytest.mark.parametrize("text", ["[]", "{}", '{"zero_optimization": {}}', "no JSON"])
def test_a_file_that_is_no_deepspeed_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(text)
    with pytest.raises(ConfigError, match=r"zero\.json.*expected a JSON object with zero_optimization.stage"):
        Zero.read(str(tmp_path / "zero.json"))


def test_a_deepspeed_config_is_read_for_what_it_shares_out(tmp_path: Path) -> None:
    values = {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": values}))
    assert Zero.read(str(tmp_path / "zero.json")) == Zero(2, True, False, None, 2)
