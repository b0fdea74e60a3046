"""Rules for settings of a recipe that have no effect because of another setting; such settings are errors."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from skipdecode.errors import ConfigError
from skipdecode.schedule.schedule import DEFAULT_RATES

Values: TypeAlias = Any  # a train.recipe.Recipe; that module imports this one


@dataclass(frozen=True)
class Rule:
    """A setting that has no effect because of another one.

    Attributes:
        key: the setting, as `section.key`.
        other: the key whose value leaves the setting without effect.
        when: tells from the recipe whether this is so; called only where the setting differs from its default.
        advice: the reason, and what to do.
    """

    key: str
    other: str
    when: Callable[[Values], bool]
    advice: str


def drop_without_effect(recipe: Values, overrides: Collection[str] | None) -> Values:
    """Reset the settings of a recipe's file that an override leaves without effect, and refuse all others.

    For example, the override `train.max_steps=100` resets the file's `train.epochs`.

    Args:
        recipe: the file and the overrides together.
        overrides: the overridden keys; None for the resolved recipe of a run, in which every key is written, so that
            any setting without effect is reset.

    Returns:
        The recipe in which such settings have their defaults.

    Raises:
        ConfigError: for any other setting without effect; it names both settings.
    """
    for rule in RULES:
        default = _field(recipe, rule.key).default
        value, other = _value(recipe, rule.key), _value(recipe, rule.other)
        if value == default or not rule.when(recipe):
            continue
        if overrides is not None and (rule.key in overrides or rule.other not in overrides):
            raise ConfigError(f"{rule.key} is {_as_yaml(value)} and {rule.other} is {_as_yaml(other)}: {rule.advice}")
        section, name = rule.key.split(".")
        changed = getattr(recipe, section).model_copy(update={name: default})
        recipe = recipe.model_copy(update={section: changed})
    return recipe


def _field(recipe: Values, key: str) -> Any:
    section, name = key.split(".")
    return type(getattr(recipe, section)).model_fields[name]


def _value(recipe: Values, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def _as_yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_null(key: str) -> Callable[[Values], bool]:
    return lambda recipe: _value(recipe, key) is None


def _is_set(key: str) -> Callable[[Values], bool]:
    return lambda recipe: _value(recipe, key) is not None


def _is(key: str, value: Any) -> Callable[[Values], bool]:
    return lambda recipe: bool(_value(recipe, key) == value)


def _has_one(key: str) -> Callable[[Values], bool]:
    return lambda recipe: _value(recipe, key) is not None and len(_value(recipe, key)) == 1


def _trains_exits(recipe: Values) -> bool:
    return bool(recipe.optim.exits != "last")


def _differs_from_exits(key: str, own: Any) -> Callable[[Values], bool]:
    """Whether exits are trained and the setting contradicts the value that they need."""
    return lambda recipe: _trains_exits(recipe) and _value(recipe, key) != own


def _full_depth_alone(recipe: Values) -> bool:
    return recipe.schedule.speedups == [1] and not _trains_exits(recipe)


def _loss_is_all_divergence(recipe: Values) -> bool:
    """Whether no step learns from the labels.

    Distillation must be the whole loss, and the teacher a frozen model, or full depth (which does learn the labels)
    must be missing from the targets. Of schedules from files this isn't known here.
    """
    if recipe.optim.teacher is not None:
        return bool(recipe.optim.distillation == 1)
    targets = recipe.schedule.speedups or recipe.schedule.speedup_range
    return recipe.optim.distillation == 1 and bool(targets) and 1 not in targets and not _trains_exits(recipe)


def _one_depth(recipe: Values) -> bool:
    """Whether all tokens of a step run the same number of layers, and so have the same weight."""
    schedule = recipe.schedule
    constant = schedule.files is None and schedule.decay == "constant" and schedule.prompt == "max"
    return constant and not _trains_exits(recipe)


def _one_between(recipe: Values) -> bool:
    targets = recipe.schedule.speedups or recipe.schedule.files or []
    return recipe.schedule.sampling == "sandwich" and 1 < len(targets) <= 3


_FROM_FILES = "each schedule file sets this itself; remove it"
_OF_EXITS = "exits are decoded with a constant budget of the lowest layers; remove it"
_ALONE = "only full depth is trained, which skips no layer; add other targets, or remove it"
_WITHOUT_W_AND_B = "nothing is sent to Weights & Biases; remove it, or turn tracking on"
_NOT_EVALUATED = "nothing is evaluated; set targets, such as evaluation.speedups=[1,2], or remove it"
_UNPUBLISHED = "nothing is published; set the repository, or remove it"
_NO_ADAPTERS = "no adapters are trained; set their rank, such as lora.r=16, or remove it"
_NO_BASE = "only a pretrained model is quantised; set model.name_or_path, or remove it"
_NOT_FROZEN = "weights in 4 bits can't be trained, only adapters on them; set lora.r=16, or remove it"
_DIVERGENCE = "no step learns from the labels; lower optim.distillation, add the target 1, or remove it"

RULES: tuple[Rule, ...] = (
    Rule(
        *("model.gguf_file", "model.name_or_path", _is_null("model.name_or_path")),
        "set the folder or the Hub repository that holds the file",
    ),
    Rule("model.quantize", "model.name_or_path", _is_null("model.name_or_path"), _NO_BASE),
    Rule("model.quantize", "lora.r", _is_null("lora.r"), _NOT_FROZEN),
    Rule(
        *("model.keep", "model.layers", _is_null("model.layers")),
        "set how many layers to keep, such as model.layers=4",
    ),
    Rule(
        *("model.order", "model.keep", lambda recipe: recipe.model.keep != "order"),
        "an order is used only with model.keep=order; set that, or remove it",
    ),
    Rule(
        *("model.vocab_size", "model.name_or_path"),
        lambda recipe: recipe.model.name_or_path is not None and recipe.model.shape is None,
        "a pretrained model has a tokenizer, so none is trained; remove it",
    ),
    Rule(
        *("model.vocab_size", "model.tokenizer", _is_set("model.tokenizer")),
        "that tokenizer is used, so none is trained; remove it",
    ),
    Rule(
        *("model.trust_remote_code", "model.name_or_path"),
        lambda recipe: recipe.model.name_or_path is None and recipe.model.tokenizer is None,
        "no checkpoint is loaded that could hold code; remove it",
    ),
    *(
        Rule(
            *("schedule.sampling", key, _has_one(key)),
            "there is only one schedule, so a step can't combine several; add more, or remove it",
        )
        for key in ("schedule.speedups", "schedule.files")
    ),
    *(
        Rule(*("schedule.weights", key, _has_one(key)), "there is only one schedule to sample; remove it")
        for key in ("schedule.speedups", "schedule.files")
    ),
    Rule(
        *("schedule.weights", "schedule.sampling", _one_between),
        "every step runs the slowest and the fastest, which leaves at most one to sample; remove it",
    ),
    Rule(
        *("schedule.weights", "schedule.speedup_range", _is_set("schedule.speedup_range")),
        "a range is sampled uniformly; remove it, or list targets in schedule.speedups",
    ),
    *(
        Rule(f"schedule.{name}", "schedule.files", _is_set("schedule.files"), _FROM_FILES)
        for name in ("decay", "decay_rate", "placement", "order", "profile", "prompt", "prompt_stop", "warmup_layers")
    ),
    *(
        Rule(f"schedule.{name}", "optim.exits", _differs_from_exits(f"schedule.{name}", own), _OF_EXITS)
        for name, own in (
            ("decay", "constant"),
            ("decay_rate", None),
            ("placement", "bottom"),
            ("order", None),
            ("spread", 0),
        )
    ),
    Rule(
        *("schedule.order", "schedule.placement", lambda recipe: recipe.schedule.placement != "order"),
        "an order is used only with schedule.placement=order; set that, or remove it",
    ),
    Rule(
        *("schedule.decay_rate", "schedule.decay", lambda recipe: recipe.schedule.decay not in DEFAULT_RATES),
        f"that decay has no rate; remove it, or use one of {', '.join(DEFAULT_RATES)}",
    ),
    Rule(
        # A spread of 0 doesn't contradict a constant schedule.
        *("schedule.spread", "schedule.decay"),
        lambda recipe: recipe.schedule.decay == "constant" and recipe.schedule.spread != 0,
        "a constant schedule has no spread; remove it, or use another decay",
    ),
    Rule(
        *("schedule.prompt_stop", "schedule.speedups", _full_depth_alone),
        "at full depth prompts don't stop early; add other targets, or remove it",
    ),
    Rule(
        *("schedule.default_speedup", "lora.merge"),
        lambda recipe: recipe.lora.r is not None and not recipe.lora.merge,
        "unmerged adapters have no generation_config.json, where the default speed is saved; remove it",
    ),
    Rule(
        *("optim.warmup_steps", "optim.scheduler", _is("optim.scheduler", "constant")),
        "that scheduler has no warm-up; use constant_with_warmup",
    ),
    Rule(
        *("schedule.weights", "schedule.sampling", _is("schedule.sampling", "all")),
        "every step runs every target, so nothing is sampled; remove it",
    ),
    Rule(
        *("optim.teacher", "optim.distillation", _is("optim.distillation", 0)),
        "the teacher has no weight in the loss; set one, such as optim.distillation=1, or remove it",
    ),
    Rule(
        *("optim.exit_every", "optim.exits", lambda recipe: recipe.optim.exits != "rotating"),
        "only rotating exits take turns; set optim.exits=rotating, or remove it",
    ),
    Rule(
        *("optim.depth_weight_power", "optim.exits", _is("optim.exits", "rotating")),
        "rotating exits have LayerSkip's weights; remove it",
    ),
    Rule("optim.teacher", "optim.exits", _trains_exits, "the last exit teaches the others; remove it"),
    Rule(
        *("optim.distillation", "schedule.speedups"),
        lambda recipe: _full_depth_alone(recipe) and recipe.optim.teacher is None,
        _ALONE,
    ),
    Rule("optim.depth_weight_power", "schedule.speedups", _full_depth_alone, _ALONE),
    Rule(
        *("optim.depth_weight_power", "schedule.decay", _one_depth),
        "with schedule.prompt 'max' all tokens then run the same number of layers and have equal weight; remove it",
    ),
    Rule("optim.depth_weight_power", "optim.distillation", _loss_is_all_divergence, _DIVERGENCE),
    Rule("optim.label_smoothing", "optim.distillation", _loss_is_all_divergence, _DIVERGENCE),
    Rule(
        *("train.epochs", "train.max_steps", _is_set("train.max_steps")),
        "train.max_steps alone ends the run; remove train.epochs, or set train.max_steps=null",
    ),
    Rule(
        *("train.finish_with", "train.validate_rows", _is("train.validate_rows", 0)),
        "the best weights are chosen by validation loss; set, for example, train.validate_rows=256",
    ),
    Rule(
        *("train.finish_with", "train.save_steps"),
        lambda recipe: recipe.train.max_steps is not None and recipe.train.save_steps >= recipe.train.max_steps,
        "the only checkpoint is the last one; save more often, such as ten times in train.max_steps, or remove it",
    ),
    *(
        Rule(f"lora.{name}", "lora.r", _is_null("lora.r"), _NO_ADAPTERS)
        for name in ("alpha", "dropout", "target_modules", "merge")
    ),
    *(
        Rule(f"evaluation.{name}", "evaluation.speedups", _is_null("evaluation.speedups"), _NOT_EVALUATED)
        for name in ("limit", "batch_size", "tokenizer")
    ),
    *(
        Rule(f"tracking.{name}", "tracking.wandb", _is("tracking.wandb", "off"), _WITHOUT_W_AND_B)
        for name in ("project", "name")
    ),
    *(
        Rule(f"publish.{name}", "publish.repository", _is_null("publish.repository"), _UNPUBLISHED)
        for name in ("public", "tag")
    ),
)
