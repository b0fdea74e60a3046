"""Recipes: one YAML file a complete run, made of typed sections."""

import math
import os
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from configs.files import ROOT, YAML_ERRORS, named_file, read_yaml
from eval.score.tokenizers import Tokenizer
from skipdecode.errors import ConfigError, first_line, unknown
from skipdecode.schedule.schedule import MAX_HORIZON, Decay, Over, Placement, PromptPolicy
from train.effects import drop_without_effect

# Not with the sampler, whose imports take seconds that a mistyped key should not.
Sampling = Literal["one", "sandwich", "all"]
RECIPES = ROOT / "recipes"
DEEPSPEED = ROOT / "configs" / "deepspeed"
LARGEST = 2**32 - 1  # of a number in a recipe, as seeds are; NaN and infinity are in no range


class Section(BaseModel):
    """A section of a recipe: strict types, no unknown key, not to be changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _expand_home(value: str | None) -> str | None:
    """A shell expands `~` at the start of a word alone, not behind `output.dir=`."""
    return value if value is None else os.path.expanduser(value)


class ModelSection(Section):
    """The model that is trained: a pretrained one, or a shape with random weights."""

    name_or_path: str | None = Field(None, description="a model on the Hub, or a local folder")
    gguf_file: str | None = Field(
        None, description="a GGUF file in name_or_path, to read model and tokenizer from, dequantised; null: none"
    )
    _expand = field_validator("name_or_path")(_expand_home)
    shape: str | None = Field(None, description="random weights instead: a name in configs/model/, or a YAML file")
    trust_remote_code: bool = Field(False, description="run Python code that the checkpoint brings; else it is refused")
    config: dict[str, Any] | None = Field(None, description="values of the model's config to change, such as dropout")
    layers: int | None = Field(
        None, ge=1, description="a shallow model: so many of its layers, of the pretrained ones too; null: all"
    )
    keep: Placement | None = Field(
        None,
        description="which of them: even, the first and the last among them (null is that); top, the first and the "
        "last ones; bottom, the first ones; ends, as many of either; order, the first ones of model.order",
    )
    order: str | list[int] | None = Field(
        None, description="with keep=order: the layers, the most important one first, or a file of `skipdecode order`"
    )
    tokenizer: str | None = Field(None, description="a Hub name or folder; with a shape, null trains one on the task")
    vocab_size: int = Field(512, ge=1, le=1_000_000, description="tokens of the tokenizer that is trained for a shape")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="of the weights")


class DataSection(Section):
    """The data that it is trained on."""

    task: str = Field(description="the task's name")
    path: str | None = Field(None, description="a local folder; null reads the Hub, or is right for a built-in task")
    _expand = field_validator("path", "cache_dir", check_fields=False)(_expand_home)
    options: dict[str, Any] = Field({}, description="the task's own options, such as delexicalise")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="null: the task's default; a longer article or post is cut, another prompt is an error"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="null: the task's default; longer ones are cut")
    limit: int | None = Field(None, ge=1, description="only the first so many examples; null: all")
    num_proc: int | None = Field(None, ge=1, description="processes that tokenise; null: one")
    cache_dir: str | None = Field(
        None, description="where tokenised rows are kept for the next start; null: the datasets library's own cache"
    )


class ScheduleSection(Section):
    """The schedules that training draws from in each optimiser step."""

    speedups: list[float] | None = Field(None, description="target speedups to draw from; [1] trains at full depth")
    files: list[str] | None = Field(None, description="schedules to draw from instead: JSON files of SkipSchedule")
    sampling: Sampling = Field(
        "one",
        description="one: a schedule a step; sandwich: slowest, fastest and one drawn between, in each step; all: "
        "every target in each step",
    )
    weights: list[float] | None = Field(
        None, description="how often each target or file is drawn (with sandwich: between its ends); null: equally"
    )
    speedup_range: list[float] | None = Field(None, description="[lowest, highest] to draw from, instead of a list")
    horizon: int | None = Field(
        None, ge=1, le=MAX_HORIZON, description="tokens over which the budget falls; null: the task's"
    )
    decay: Decay = Field("linear", description="how the budget falls")
    decay_rate: float | None = Field(None, description="exponent, rate or plateaus of the decay")
    placement: Placement = Field("top", description="where the layers that run lie")
    order: str | list[int] | None = Field(
        None,
        description="with placement=order: the layers, the most important one first; a file of `skipdecode order`; or "
        "auto: measured on the training rows before training, which takes minutes, and kept with the run",
    )
    prompt: PromptPolicy | int = Field(
        "full", description="full: prompts run every layer; max: those of the largest budget; a number: so many at most"
    )
    prompt_stop: int | None = Field(
        None,
        ge=1,
        description="layers that prompts' tokens run before they stop: those above take keys and values from that "
        "state (SwiftKV), and the last token alone runs on; null: they don't stop",
    )
    warmup_layers: int = Field(1, ge=1, description="layers at the bottom that always run")
    spread: float = Field(0.5, ge=0, le=1, description="(max - min) / (max + min) of the budgets; 0 is constant")
    over: Over = Field(
        "decode", description="what a target is of: decode, of decoding; all, of prompt and decoding together"
    )
    profile: str | None = Field(
        None,
        description="the times of a machine that targets are solved by: auto, those of `skipdecode calibrate` on this "
        "machine, or where there are none the analytical cost model of a CPU or a GPU, whichever trains; a file of "
        "`skipdecode calibrate --output`; null: the analytical cost model of a GPU",
    )
    default_speedup: float | None = Field(
        None,
        ge=1,
        description="what the finished checkpoint decodes at where nobody asks for a speed, as under `transformers "
        "serve`; null: 2, or the nearest that was trained for",
    )
    batch_size: int = Field(
        1, ge=1, le=65_536, description="rows that will decode together: a target is for their wall clock"
    )
    prompt_length: int | None = Field(
        None, ge=1, description="tokens of the prompts that will be decoded, likewise; null: the training prompts'"
    )
    texts: int = Field(
        256,
        ge=0,
        description="training prompts that the finished checkpoint continues, at the slowest speed that is trained, to "
        "know how long its texts are; 0: it takes them to be as long as those of the training",
    )


class OptimSection(Section):
    """The optimiser (AdamW) and the loss."""

    learning_rate: float = Field(1e-5, gt=0, description="its peak")
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
        description="share of the loss that pulls a skipping step, or an exit, to the model's own full-depth output",
    )
    teacher: str | None = Field(
        None,
        description="a folder or Hub name of a fine-tuned model of the same tokenizer: its frozen copy teaches every "
        "step, full depth's too, in place of the model's own full depth; with distillation",
    )
    _expand = field_validator("teacher")(_expand_home)
    depth_weight_power: float = Field(
        0.0, ge=-10, le=10, description="weight of a token, or of an exit, ~ (its layers / all layers) ** power"
    )
    exits: Literal["last", "all"] = Field(
        "last", description="all: an exit after every layer, through the one head, has a loss (multi-layer early exit)"
    )


class TrainSection(Section):
    """The length of the run, its batches, and how often it logs and saves."""

    epochs: float = Field(1.0, gt=0, description="passes over the data, unless max_steps is given")
    max_steps: int | None = Field(None, ge=1, description="optimiser steps; overrides epochs")
    per_device_batch_size: int = Field(16, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    gradient_checkpointing: bool = Field(False)
    precision: Literal["float32", "bf16", "fp16"] = Field("float32", description="of the computation (autocast)")
    logging_steps: int = Field(10, ge=1)
    save_steps: int = Field(500, ge=1, description="a checkpoint to resume from, every so many steps")
    save_total_limit: int = Field(2, ge=1, description="how many of them are kept; the best one besides")
    validate_rows: int = Field(
        0, ge=0, description="rows of the validation split whose loss at each target is taken at every checkpoint"
    )
    finish_with: Literal["last", "best"] = Field("last", description="whose weights the finished run holds")
    seed: int = Field(0, ge=0, description="weights, data order, dropout and schedule draws follow from it")


class LoraSection(Section):
    """Low-rank adapters (LoRA): few weights are trained beside the model's own, which stay as they are."""

    r: int | None = Field(None, ge=1, description="rank of the adapters; null: none, every weight is trained")
    alpha: int = Field(32, ge=1, description="the adapters' output is scaled by alpha / r")
    dropout: float = Field(0.0, ge=0, lt=1, description="of the adapters' input")
    target_modules: list[str] | None = Field(None, description="names of layers to adapt; null: peft's for the family")
    merge: bool = Field(True, description="into the finished checkpoint's weights; false: adapters apart")


class EvaluationSection(Section):
    """The evaluation after training, on the task's test split."""

    speedups: list[float] | None = Field(None, description="target speedups to decode at; null: no evaluation")
    limit: int | None = Field(None, ge=1, description="examples; null: all")
    batch_size: int = Field(8, ge=1, le=65_536, description="rows that decode together")
    max_new_tokens: int | None = Field(
        None,
        ge=2,
        description="null: the task's default; it is also how many the finished checkpoint writes where its caller "
        "doesn't say",
    )
    tokenizer: Tokenizer | None = Field(
        None, description="of sacrebleu, whose words metrics count; null: each metric's own, made for English"
    )

    @field_validator("speedups")
    @classmethod
    def _targets(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and (
            not value or len(set(value)) < len(value) or not all(1 <= v < math.inf for v in value)
        ):
            raise ValueError("expected different targets of 1 or more, such as [1, 2, 4]")
        return value


class DeepSpeedSection(Section):
    """DeepSpeed."""

    config: str | None = Field(None, description="a name in configs/deepspeed/, or a JSON file; null: none")


class TrackingSection(Section):
    """Weights & Biases. The same figures always go to metrics.jsonl in the output folder."""

    wandb: Literal["auto", "online", "offline", "off"] = Field("auto", description="auto: online where a key is set")
    project: str = Field("skipdecode")
    name: str | None = Field(None, description="of the run; null: the recipe's")

    @field_validator("wandb", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class PublishSection(Section):
    """The Hub, after training and evaluation; `scripts/publish.py` does the same later."""

    repository: str | None = Field(None, description="OWNER/NAME; null: the run isn't published")
    public: bool = Field(False, description="whether a new repository may be seen by all")
    tag: str | None = Field(None, description="for the commit")


class OutputSection(Section):
    """The folder that the run goes into."""

    dir: str | None = Field(None, description="a folder that holds no other run; null: outputs/RECIPE")
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
        """The resolved recipe, every key of it, as `--recipe` reads it back."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump()))


def _no_environment(*_: str) -> str:
    raise ConfigError(
        "a recipe reads no environment variable (oc.env): its value would stand in recipe.yaml, which is published; "
        "write it out, as in section.key=$NAME on the command line"
    )


OmegaConf.register_resolver("oc.env", _no_environment, replace=True)


def recipe_names() -> list[str]:
    """The recipes that `--recipe NAME` finds."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name: str, overrides: list[str] | None = None, *, of_a_run: bool = False) -> Recipe:
    """The recipe of a name in recipes/ or of a YAML file, with overrides such as `optim.learning_rate=1e-4`.

    Raises ConfigError that names the unknown recipe or key and the nearest valid one, or the value and what is allowed;
    and for a setting that another one leaves without effect, as `drop_without_effect` says, unless the file is that
    `of_a_run`.
    """
    path = named_file(name, RECIPES, ".yaml", "recipe")
    values = read_yaml(path)
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals or not key or "." not in key:
            raise ConfigError(f"override {override!r}: expected section.key=value, such as train.max_steps=100")
        if not value.strip():
            raise ConfigError(f"override {override!r} has no value: null is none, and {key}=\"''\" an empty text")
    try:
        changes = OmegaConf.from_dotlist(overrides or [])
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(values), changes), resolve=True)
        _check_values(merged, path.name)
    except ConfigError:
        raise
    except (*YAML_ERRORS, TypeError) as error:  # the last for an index into a list
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
    """The `section.key` of an override, which may change a value within it, as in `model.config.dropout=0`."""
    return ".".join(override.partition("=")[0].split(".")[:2])


def _check_values(value: Any, where: str, key: str = "") -> None:
    """Raises ConfigError for what no key can hold, wherever it is: NaN, an endless number, bytes that are no text."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(item, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ConfigError(f"{where}: {key} is {value}: it must be a number within {LARGEST}")
    elif isinstance(value, str) and any(mark == "\0" or "\ud800" <= mark <= "\udfff" for mark in value):
        raise ConfigError(f"{where}: {key} is {value!r}: it must be text in UTF-8, without NUL")


def _check_orders(recipe: Recipe) -> None:
    """Raises ConfigError for a placement by an order that isn't given."""
    schedule, model = recipe.schedule, recipe.model
    if schedule.placement == "order" and schedule.order is None:
        raise ConfigError("schedule.placement is 'order' without schedule.order: name the layers, a file, or auto")
    if model.keep == "order" and model.order is None:
        raise ConfigError("model.keep is 'order' without model.order: name the layers, or a file of them")
    if model.order == "auto":
        raise ConfigError("model.order is 'auto': find it first, with `skipdecode order`, and name the file")


def _as_config_error(error: ValidationError, path: Path) -> ConfigError:
    """pydantic's first complaint as one line: the dotted key, the value, what is allowed."""
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
