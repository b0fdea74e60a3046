"""Recipes: one YAML file describes a complete run, in typed sections."""

import math
import os
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from configs.files import ROOT, YAML_ERRORS, from_dotlist, named_file, read_yaml
from eval.score.tokenizers import Tokenizer
from skipdecode.errors import ConfigError, first_line, unknown
from skipdecode.schedule.schedule import MAX_HORIZON, Decay, Over, Placement, PromptPolicy, Sampling
from train.effects import drop_without_effect

RECIPES = ROOT / "recipes"
DEEPSPEED = ROOT / "configs" / "deepspeed"
MAX_NUMBER = 2**32 - 1  # the largest number allowed in a recipe, which is the largest seed


class Section(BaseModel):
    """A section of a recipe: types are strict, unknown keys are errors, and values can't be changed afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _expand_home(value: str | None) -> str | None:
    """Expand `~`, which a shell leaves alone in `output.dir=~/run`."""
    return value if value is None else os.path.expanduser(value)


class ModelSection(Section):
    """The model to train: a pretrained one, or one of a given shape with random weights."""

    name_or_path: str | None = Field(None, description="a model on the Hub, or a local folder")
    gguf_file: str | None = Field(
        None, description="a GGUF file in name_or_path; model and tokenizer are read from it and dequantised"
    )
    _expand = field_validator("name_or_path")(_expand_home)
    shape: str | None = Field(None, description="a name in configs/model/, or a YAML file: a model of random weights")
    trust_remote_code: bool = Field(False, description="run the Python code in the checkpoint; false refuses such code")
    config: dict[str, Any] | None = Field(None, description="values of the model's config to change, such as dropout")
    layers: int | None = Field(
        None, ge=1, description="keep only this many layers and train a shallow model; null: keep all"
    )
    keep: Placement | None = Field(
        None,
        description="which layers a shallow model keeps: even (also null), spaced evenly, with the first and the last; "
        "top, the first layer and the last ones; bottom, the first ones; ends, half from each end; order, the first "
        "ones in model.order",
    )
    order: str | list[int] | None = Field(
        None, description="with keep=order: the layers, most important first, or a file written by `skipdecode order`"
    )
    tokenizer: str | None = Field(
        None, description="a Hub name or folder; null: the model's own, or with a shape, one trained on the task"
    )
    vocab_size: int = Field(512, ge=1, le=1_000_000, description="size of the tokenizer that is trained for a shape")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="data type of the weights")
    quantize: Literal["nf4"] | None = Field(
        None,
        description="with lora.r: nf4, the frozen projections are stored in 4 bits and computed in model.dtype (QLoRA, "
        "with double quantisation; needs the extra qlora); null: all weights have model.dtype",
    )


class DataSection(Section):
    """The training data."""

    task: str = Field(description="the task's name")
    path: str | None = Field(None, description="a local folder; null: the Hub, or nothing for a built-in task")
    _expand = field_validator("path", "completions", "cache_dir", check_fields=False)(_expand_home)
    options: dict[str, Any] = Field({}, description="the task's own options, such as delexicalise")
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="null: the task's default; longer articles and posts are truncated, other long prompts are errors",
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="null: the task's default; longer completions are truncated"
    )
    limit: int | None = Field(None, ge=1, description="use only this many examples, the first ones; null: all")
    completions: str | None = Field(
        None,
        description="train on the texts of this file, one per example, in place of the data's completions: the "
        "predictions of a fine-tuned model for the training prompts, from `python -m eval --split train`",
    )
    num_proc: int | None = Field(None, ge=1, description="number of tokenisation processes; null: one")
    cache_dir: str | None = Field(
        None, description="folder in which tokenised rows are cached; null: the cache of the datasets library"
    )


class ScheduleSection(Section):
    """The skip schedules under which the optimiser steps run."""

    speedups: list[float] | None = Field(None, description="target speedups to sample from; [1] trains at full depth")
    files: list[str] | None = Field(None, description="JSON files of SkipSchedule to sample from, instead of speedups")
    sampling: Sampling = Field(
        "one",
        description="one: each step samples one schedule; sandwich: each step runs the slowest, the fastest and one "
        "sampled in between; all: each step runs every target",
    )
    weights: list[float] | None = Field(
        None,
        description="relative sampling frequency of each target or file (with sandwich, of those in between); null: "
        "equal",
    )
    speedup_range: list[float] | None = Field(
        None, description="[lowest, highest]: a range of target speedups to sample from, instead of speedups"
    )
    horizon: int | None = Field(
        None, ge=1, le=MAX_HORIZON, description="tokens over which the budget decays; null: the task's default"
    )
    decay: Decay = Field("linear", description="shape of the budget's decay")
    decay_rate: float | None = Field(None, description="exponent, rate or number of plateaus of the decay")
    placement: Placement = Field("top", description="which layers a budget runs")
    order: str | list[int] | None = Field(
        None,
        description="with placement=order: the layers, most important first; a file written by `skipdecode order`; or "
        "auto: the order is measured on the training rows before training, which takes minutes, and saved with the run",
    )
    prompt: PromptPolicy | int = Field(
        "full",
        description="layers that prompts run: full, every layer; max, those of the largest budget; a number, at most "
        "this many",
    )
    prompt_stop: int | None = Field(
        None,
        ge=1,
        description="layers after which prompt tokens stop: the layers above compute their keys and values from that "
        "hidden state (SwiftKV), and only the last token continues; null: prompt tokens don't stop",
    )
    warmup_layers: int = Field(1, ge=1, description="lowest layers, which always run")
    spread: float = Field(
        0.5, ge=0, le=1, description="(max - min) / (max + min) of the budgets; 0 is a constant schedule"
    )
    over: Over = Field(
        "decode", description="what a target speedup covers: decode, decoding alone; all, end-to-end (prefill + decode)"
    )
    profile: str | None = Field(
        None,
        description="calibrated profile by which targets are solved: auto, the one that `skipdecode calibrate` saved "
        "on this machine, or else the analytical cost model of the CPU or GPU that trains; a file of `skipdecode "
        "calibrate --output`; null: the analytical cost model of a GPU",
    )
    default_speedup: float | None = Field(
        None,
        ge=1,
        description="speed at which the finished checkpoint decodes if the caller names none, as in `transformers "
        "serve`; null: 2, or the nearest trained target",
    )
    batch_size: int = Field(1, ge=1, le=65_536, description="batch size at decoding time for which targets are solved")
    prompt_length: int | None = Field(
        None,
        ge=1,
        description="prompt length in tokens for which targets are solved; null: the lengths of the training prompts",
    )
    texts: int = Field(
        256,
        ge=0,
        description="training prompts that the finished checkpoint continues, at the slowest trained speed, to measure "
        "how long its outputs are; 0: the lengths of the training completions are used",
    )


class OptimSection(Section):
    """The optimiser (AdamW) and the loss."""

    learning_rate: float = Field(1e-5, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field("cosine")
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    distillation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="weight of the distillation loss, which pulls the output of skipping schedules, or of early exits, "
        "towards the full-depth output",
    )
    teacher: str | None = Field(
        None,
        description="with distillation: a fine-tuned model (folder or Hub name) with the same tokenizer, which is "
        "frozen and teaches every schedule, full depth too; null: the trained model's own full depth teaches",
    )
    _expand = field_validator("teacher")(_expand_home)
    depth_weight_power: float = Field(
        0.0, ge=-10, le=10, description="a token, or an exit, is weighted by (its layers / all layers) ** this power"
    )
    exits: Literal["last", "all", "rotating"] = Field(
        "last",
        description="last: the loss of the last layer; all: the mean loss of an exit after every layer; rotating: the "
        "last layer and every optim.exit_every-th exit, others in each step, deep ones weighted more (LayerSkip)",
    )
    exit_every: int = Field(8, ge=1, description="with exits=rotating: steps until an exit has a loss again")
    layer_dropout: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a row bypasses the last layer in training; those of lower layers are lower "
        "(LayerSkip)",
    )


class TrainSection(Section):
    """The length of the run, its batches, and how often it logs and saves."""

    epochs: float = Field(1.0, gt=0, description="passes over the data, if max_steps isn't set")
    max_steps: int | None = Field(None, ge=1, description="optimiser steps; overrides epochs")
    per_device_batch_size: int = Field(16, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    gradient_checkpointing: bool = Field(False)
    precision: Literal["float32", "bf16", "fp16"] = Field("float32", description="computation data type (autocast)")
    logging_steps: int = Field(10, ge=1)
    save_steps: int = Field(500, ge=1, description="steps between the checkpoints that a stopped run resumes from")
    save_total_limit: int = Field(2, ge=1, description="number of such checkpoints kept, besides the best one")
    validate_rows: int = Field(
        0, ge=0, description="validation rows whose loss at each target is computed at every checkpoint; 0: none"
    )
    finish_with: Literal["last", "best"] = Field(
        "last", description="weights of the finished run: those of the last step, or of the best validation loss"
    )
    seed: int = Field(0, ge=0, description="seed of the weights, the data order, dropout and schedule sampling")


class LoraSection(Section):
    """Low-rank adapters (LoRA): a few added weights are trained, and the model's own stay frozen."""

    r: int | None = Field(None, ge=1, description="rank of the adapters; null: no adapters, every weight is trained")
    alpha: int = Field(32, ge=1, description="the adapters' output is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of the adapters' input")
    target_modules: list[str] | None = Field(
        None, description="names of the modules to adapt; null: peft's default for the model family"
    )
    merge: bool = Field(
        True, description="true: the finished checkpoint has the adapters merged in; false: it holds the adapters alone"
    )


class EvaluationSection(Section):
    """The evaluation after training, on the task's test split."""

    speedups: list[float] | None = Field(None, description="target speedups to decode at; null: no evaluation")
    limit: int | None = Field(None, ge=1, description="number of examples; null: all")
    batch_size: int = Field(8, ge=1, le=65_536, description="sequences decoded together")
    max_new_tokens: int | None = Field(
        None,
        ge=2,
        description="null: the task's default; it becomes the finished checkpoint's default number of new tokens too",
    )
    tokenizer: Tokenizer | None = Field(
        None, description="sacrebleu tokenizer that splits text into words for the metrics; null: each metric's default"
    )

    @field_validator("speedups")
    @classmethod
    def _targets(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and (
            not value or len(set(value)) < len(value) or not all(1 <= v < math.inf for v in value)
        ):
            raise ValueError("expected distinct targets of at least 1, such as [1, 2, 4]")
        return value


class DeepSpeedSection(Section):
    """DeepSpeed."""

    config: str | None = Field(None, description="a name in configs/deepspeed/, or a JSON file; null: none")


class TrackingSection(Section):
    """Weights & Biases. The same metrics are always written to metrics.jsonl in the output folder."""

    wandb: Literal["auto", "online", "offline", "off"] = Field(
        "auto", description="auto: online if an API key is set, else offline"
    )
    project: str = Field("skipdecode")
    name: str | None = Field(None, description="name of the run; null: the recipe's name")

    @field_validator("wandb", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class PublishSection(Section):
    """Publishing to the Hub after training and evaluation; `scripts/publish.py` does the same later."""

    repository: str | None = Field(None, description="OWNER/NAME on the Hub; null: the run isn't published")
    public: bool = Field(False, description="make a new repository public")
    tag: str | None = Field(None, description="tag of the commit")


class OutputSection(Section):
    """The run's output folder."""

    dir: str | None = Field(None, description="a folder without another run in it; null: outputs/RECIPE")
    _expand = field_validator("dir")(_expand_home)


class Recipe(Section):
    """A complete run."""

    model: ModelSection
    data: DataSection
    schedule: ScheduleSection
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    evaluation: EvaluationSection = EvaluationSection()
    tracking: TrackingSection = TrackingSection()
    output: OutputSection = OutputSection()
    publish: PublishSection = PublishSection()

    def to_yaml(self) -> str:
        """The resolved recipe with every key, in a form that `--recipe` reads."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump()))


def _no_environment(*_: str) -> str:
    raise ConfigError(
        "a recipe can't read environment variables (oc.env), because their values would be saved in recipe.yaml, which "
        "is published; pass the value on the command line, as in section.key=$NAME"
    )


OmegaConf.register_resolver("oc.env", _no_environment, replace=True)


def recipe_names() -> list[str]:
    """The names that `--recipe NAME` accepts."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name: str, overrides: list[str] | None = None, *, of_a_run: bool = False) -> Recipe:
    """Load a recipe by its name in recipes/ or its path, with overrides such as `optim.learning_rate=1e-4`.

    Args:
        name: a recipe's name, or the path of a YAML file.
        overrides: values that replace those of the file, each as `section.key=value`.
        of_a_run: whether the file is the resolved recipe of a run. In it a setting that another one leaves without
            effect is dropped, where elsewhere it is an error (see `drop_without_effect`).

    Raises:
        ConfigError: naming the unknown recipe or key and the nearest valid one, or the value and what is allowed; and
            for a setting without effect.
    """
    path = named_file(name, RECIPES, ".yaml", "recipe")
    values = read_yaml(path)
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals or not key or "." not in key:
            raise ConfigError(f"override {override!r}: expected section.key=value, such as train.max_steps=100")
        if not value.strip():
            raise ConfigError(
                f"override {override!r} has no value: {key}=null unsets it, and {key}=\"''\" sets an empty string"
            )
    try:
        changes = from_dotlist(overrides or [])
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(values), changes), resolve=True)
        _check_values(merged, path.name)
    except ConfigError:
        raise
    except (*YAML_ERRORS, TypeError) as error:  # OmegaConf raises TypeError for an index into a list
        raise ConfigError(f"overrides {str(overrides)[:200]}: {first_line(error)}") from error
    try:
        validated = Recipe.model_validate(merged)
    except ValidationError as error:
        raise _as_config_error(error, path) from error
    overridden = None if of_a_run else {_dotted(override) for override in overrides or []}
    recipe: Recipe = drop_without_effect(validated, overridden)
    _check_orders(recipe)
    if recipe.output.dir is None:
        output = OutputSection(dir=os.path.join("outputs", path.stem))
        recipe = recipe.model_copy(update={"output": output})
    return recipe


def _dotted(override: str) -> str:
    """The `section.key` of an override, which may be nested deeper, as in `model.config.dropout=0`."""
    return ".".join(override.partition("=")[0].split(".")[:2])


def _check_values(value: Any, where: str, key: str = "") -> None:
    """Raises ConfigError for values that no key accepts: NaN, infinite or huge numbers, strings that aren't UTF-8."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(item, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise ConfigError(f"{where}: {key} is {value}: it must be a number between -{MAX_NUMBER} and {MAX_NUMBER}")
    elif isinstance(value, str) and any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{where}: {key} is {value!r}: it must be valid UTF-8 without NUL characters")


def _check_orders(recipe: Recipe) -> None:
    """Raises ConfigError where layers are placed by an order and the recipe gives none."""
    schedule, model = recipe.schedule, recipe.model
    if schedule.placement == "order" and schedule.order is None:
        raise ConfigError(
            "schedule.placement is 'order' without schedule.order: give a list of layers, a file, or auto"
        )
    if model.keep == "order" and model.order is None:
        raise ConfigError("model.keep is 'order' without model.order: give a list of layers, or a file")
    if model.order == "auto":
        raise ConfigError("model.order is 'auto': measure the order first with `skipdecode order`, and name its file")


def _as_config_error(error: ValidationError, path: Path) -> ConfigError:
    """The first error that pydantic found, in one line: the dotted key, the value, and what is allowed."""
    first = error.errors()[0]
    keys = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        section: Any = Recipe
        for key in keys[:-1]:
            section = section.model_fields[key].annotation
        return unknown(
            f"key in {path.name} or the overrides",
            ".".join(keys),
            [".".join([*keys[:-1], name]) for name in section.model_fields],
        )
    if first["type"] == "missing":
        return ConfigError(f"{path.name}: {'.'.join(keys)} is missing")
    return ConfigError(f"{path.name}: {'.'.join(keys)} is {first['input']!r}: {first['msg']}")
