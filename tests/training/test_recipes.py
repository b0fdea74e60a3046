"""Every recipe is consistent: its schedules, its DeepSpeed config and its row in the README's table."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_python import run_python
from transformers import OPTConfig, OPTForCausalLM

from skipdecode import CostModel
from skipdecode.checkpoint.loading import load_tokenizer
from train.build import build_task, model_config
from train.prepare import recipe_sampler
from train.recipe import RECIPES, load_recipe, recipe_names

TABLE = (RECIPES / "README.md").read_text(encoding="utf-8")
FOLDERS = {name: ["data.path=."] for name in ("text", "chat-smollm2-135m")}  # not read, but needed by these tasks


def test_every_task_has_a_recipe_for_each_model_size_and_kind() -> None:
    named = {"e2e-opt-125m-scratch", "e2e-tiny", "webnlg-tiny", "viggo-tiny", "quickstart", "text"}
    for task in ("e2e", "webnlg", "viggo", "tldr", "cnndm"):
        named |= {f"{task}-opt-{size}{kind}" for size in ("1.3b", "6.7b") for kind in ("", "-lora")}
        named.add(f"{task}-opt-6.7b-qlora")
    named |= {f"{task}-smollm2-135m" for task in ("e2e", "tldr", "cnndm", "chat")}
    assert named == set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipes_model_can_reach_its_targets(name: str) -> None:
    recipe = load_recipe(name, FOLDERS.get(name))
    cost = CostModel.of(model_config(recipe), getattr(torch, recipe.model.dtype))
    task = build_task(recipe)
    sampler, _ = recipe_sampler(recipe, task, cost)
    for speedup, schedule in zip(sampler.speedups, sampler.schedules, strict=True):
        section = recipe.schedule
        conditions = {"prompt_length": section.prompt_length, "batch_size": section.batch_size}
        found = cost.at(**conditions).speedup(schedule, over=section.over)
        assert speedup <= found
        if schedule.max_layers > schedule.min_layers or schedule.max_layers == schedule.num_layers:
            assert found < speedup * 1.35, "the nearest that whole layers allow"
        else:  # a constant schedule has a whole number of layers
            deeper = replace(schedule, max_layers=schedule.max_layers + 1, min_layers=schedule.min_layers + 1)
            assert cost.at(**conditions).speedup(deeper, over=section.over) < speedup
        assert schedule.horizon == task.horizon
    evaluated = recipe.evaluation.speedups
    assert evaluated is None or set(evaluated) <= set(sampler.speedups)


@pytest.mark.parametrize("name", recipe_names())
def test_settings_of_each_recipe_are_consistent(name: str) -> None:
    recipe = load_recipe(name, FOLDERS.get(name))
    assert recipe.deepspeed.config in (None, "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
    assert (recipe.lora.r is not None) == name.endswith(("-lora", "-qlora"))
    assert (recipe.model.quantize is not None) == name.endswith("-qlora")
    task = build_task(recipe)
    longest = (recipe.data.max_prompt_tokens or task.max_prompt_tokens) + task.max_new_tokens
    assert longest <= model_config(recipe).max_position_embeddings


def test_the_opt_shapes_have_the_parameter_counts_of_the_published_models() -> None:
    """With tied embeddings and a vocabulary of 50,272 tokens."""
    for size, expected in (("125m", 125_239_296), ("1.3b", 1_315_758_080), ("6.7b", 6_658_473_984)):
        recipe = load_recipe("e2e-opt-1.3b", [f"model.name_or_path=facebook/opt-{size}"])
        cost = CostModel.of(model_config(recipe))
        config = model_config(recipe)
        positions = (config.max_position_embeddings + 2) * config.hidden_size
        layers = cost.num_layers * cost.layer_parameters
        assert layers + cost.head_parameters + cost.other_parameters + positions == expected


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_in_the_readmes_table(name: str) -> None:
    recipe = load_recipe(name)
    (line,) = re.findall(rf"^\| \[`{re.escape(name)}`\]\({re.escape(name)}\.yaml\).*$", TABLE, re.MULTILINE)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == recipe.data.task
    assert cells[4] == (recipe.deepspeed.config or "none")
    first, *_, last = (float(cell) for cell in cells[5:])
    assert len(cells) == 9
    assert last < first or recipe.deepspeed.config is None


def test_the_readmes_table_is_the_output_of_its_command(tmp_path: Path) -> None:
    assert run_python(["scripts/recipe_memory.py", "--recipe", "quickstart"], tmp_path / "log.txt") == 0
    printed = [line for line in (tmp_path / "log.txt").read_text().splitlines() if line.startswith("|")]
    assert printed
    assert set(printed) <= set(TABLE.splitlines())


# OPT's vocabulary with a hidden size of 16, and layers that are large enough to reach the targets.
SHRUNKEN = {"num_hidden_layers": 12, "hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2}
SHRUNKEN |= {"ffn_dim": 16384, "vocab_size": 50272, "max_position_embeddings": 2048}
CONFIGS = (None, "zero2", "zero3")
POST = "SUBREDDIT: r/cats\n\nTITLE: My cat ate a moth\n\nPOST: It was a large one. She looked surprised.\n\nTL;DR:"


@pytest.fixture(scope="module")
def shrunken(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OPT checkpoint with random weights and OPT's real tokenizer, and rows in the format of TL;DR."""
    folder = tmp_path_factory.mktemp("shrunken")
    torch.manual_seed(0)
    config = OPTConfig(**SHRUNKEN, pad_token_id=1, bos_token_id=2, eos_token_id=2)
    OPTForCausalLM(config).save_pretrained(folder / "opt")
    load_tokenizer(str(shared_data / "opt")).save_pretrained(folder / "opt")
    (folder / "tldr").mkdir()
    row = json.dumps({"prompt": POST, "completion": " Cat ate moth."}) + "\n"
    for split in ("train", "validation", "test"):
        (folder / "tldr" / f"{split}.jsonl").write_text(4 * row)
    return folder


@pytest.mark.parametrize(
    ("deepspeed", "which"),
    [(None, "a size"), ("zero3", "a size"), *(pytest.param(c, "all", marks=pytest.mark.release) for c in CONFIGS)],
)
def test_recipes_train_and_evaluate_with_a_small_model(
    deepspeed: str | None, which: str, shrunken: Path, shared_data: Path, tmp_path: Path
) -> None:
    """Two steps with each recipe's tokenizer, task, precision, adapters and DeepSpeed config, and an evaluation of one.

    Before a release this runs all recipes, and evaluates one of each task; otherwise it runs one of each task without
    DeepSpeed, and one with it.
    """
    paths = {name: shared_data / name for name in ("e2e", "webnlg", "viggo", "cnndm")} | {"tldr": shrunken / "tldr"}
    runs: dict[str, list[str]] = {}
    trained, evaluated = set(), dict[str, str]()  # evaluated: task, or "first" -> recipe
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.deepspeed.config != deepspeed or ("opt-1" not in name and "opt-6" not in name):
            continue
        kind = recipe.data.task if deepspeed is None else "first"
        if which == "a size" and recipe.model.shape is None and kind in trained:
            continue
        trained.add(kind)
        folder = tmp_path / name
        overrides = [f"data.path={paths[recipe.data.task]}", "data.limit=4", f"output.dir={folder}"]
        overrides += ["train.max_steps=2", "train.per_device_batch_size=1", "train.gradient_accumulation_steps=1"]
        overrides += ["train.logging_steps=1", "evaluation.max_new_tokens=4"]
        overrides += ["data.max_completion_tokens=16", "schedule.texts=4"]
        overrides += [f"data.cache_dir={tmp_path / 'cache'}", "tracking.wandb=off"]
        if evaluated.setdefault(kind if which == "all" else "first", name) != name:
            overrides.append("evaluation.speedups=null")
        else:
            overrides.append("evaluation.limit=2")
        if recipe.data.task == "cnndm":
            overrides.append("data.options={holdout: 4}")
        if recipe.data.task in ("tldr", "cnndm"):
            overrides.append("data.max_prompt_tokens=16")
        if recipe.model.shape is not None:
            overrides += [f"model.tokenizer={shared_data / 'opt'}", f"model.config={json.dumps(SHRUNKEN)}"]
        else:
            overrides.append(f"model.name_or_path={shrunken / 'opt'}")
        runs[name] = ["--recipe", name, *overrides]
    # One process trains all recipes of a DeepSpeed config, without pictures, which saves three quarters of the time.
    code = "import json, sys, train.cli, train.run; train.run.draw_schedules = lambda *given: None;"
    code += "sys.exit(max(train.cli.main(run) for run in json.loads(sys.argv[1])))"
    log = tmp_path / "log.txt"
    assert run_python(["-c", code, json.dumps(list(runs.values()))], log) == 0, log.read_text()[-3000:]
    assert runs
    for name in runs:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2]
        weights = "adapter_model" if name.endswith("-qlora") else "model"
        assert (tmp_path / name / f"{weights}.safetensors").exists()
        assert (tmp_path / name / "adapter").exists() == name.endswith("-lora")
    for name in evaluated.values():
        rows = json.loads((tmp_path / name / "eval" / "report.json").read_text())["rows"]
        assert [row["speedup_target"] for row in rows] == load_recipe(name).evaluation.speedups
