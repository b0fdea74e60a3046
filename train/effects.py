"""Settings of a recipe that another setting leaves without any effect: they are refused."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

from skipdecode.errors import ConfigError
from skipdecode.schedule.schedule import DEFAULT_RATES

Values: TypeAlias = Any  # a train.recipe.Recipe, whose module imports this one


@dataclass(frozen=True)
class Rule:
    """A setting that has no effect beside another one.

    Attributes:
        key: of the setting, as in `section.key`.
        other: the key whose value leaves it without effect.
        when: whether the values of a recipe do; called only where `key` has another value than its default.
        advice: what the other value means for this one, and what to do.
    """

    key: str
    other: str
    when: Callable[[Values], bool]
    advice: str


def drop_without_effect(recipe: Values, overrides: Collection[str] | None) -> Values:
    """The recipe without the settings of its file that an override leaves without effect.

    An override replaces what stands in the file, and with it what the file says beside it: under `train.max_steps=100`
    the file's `train.epochs` is dropped. Any other setting without effect is an error, as somebody expects one of it.

    Args:
        recipe: of the file and the overrides together.
        overrides: the keys that were overridden; None for the recipe of a run, in which every key is written down, of
            whoever set it: whatever has no effect is dropped.

    Raises:
        ConfigError: for a setting without effect, naming it and the other one.
    """
    for rule in RULES:
        default = _field(recipe, rule.key).default
        value, other = _value(recipe, rule.key), _value(recipe, rule.other)
        if value == default or not rule.when(recipe):
            continue
        if overrides is not None and (rule.key in overrides or rule.other not in overrides):
            raise ConfigError(f"{rule.key} is {_said(value)} and {rule.other} is {_said(other)}: {rule.advice}")
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


def _said(value: Any) -> str:
    """A value as YAML has it, where null is None."""
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
    return bool(recipe.optim.exits == "all")


def _differs_from_exits(key: str, own: Any) -> Callable[[Values], bool]:
    """Whether a setting isn't the one that exits have anyway, which is no contradiction."""
    return lambda recipe: _trains_exits(recipe) and _value(recipe, key) != own


def _full_depth_alone(recipe: Values) -> bool:
    return recipe.schedule.speedups == [1] and not _trains_exits(recipe)


def _loss_is_all_divergence(recipe: Values) -> bool:
    """Whether every step learns from a teacher's output alone: it is a frozen model, or full depth itself, which learns
    the labels, isn't among the targets. Of schedules from files that isn't known here.
    """
    if recipe.optim.teacher is not None:
        return bool(recipe.optim.distillation == 1)
    targets = recipe.schedule.speedups or recipe.schedule.speedup_range
    return recipe.optim.distillation == 1 and bool(targets) and 1 not in targets and not _trains_exits(recipe)


def _one_depth(recipe: Values) -> bool:
    """Whether all tokens of a step run equally many layers, so that all weigh the same."""
    schedule = recipe.schedule
    constant = schedule.files is None and schedule.decay == "constant" and schedule.prompt == "max"
    return constant and not _trains_exits(recipe)


def _one_between(recipe: Values) -> bool:
    targets = recipe.schedule.speedups or recipe.schedule.files or []
    return recipe.schedule.sampling == "sandwich" and 1 < len(targets) <= 3


_FROM_FILES = "a schedule from a file has its own; leave it out"
_OF_EXITS = "exits are decoded by a constant budget of the lowest layers; leave it out"
_ALONE = "full depth alone is trained, which skips nothing; name other targets, or leave it out"
_WITHOUT_W_AND_B = "nothing is sent to Weights & Biases; leave it out, or turn tracking on"
_NOT_EVALUATED = "nothing is evaluated; name targets, such as evaluation.speedups=[1,2], or leave it out"
_UNPUBLISHED = "nothing is published; name the repository, or leave it out"
_NO_ADAPTERS = "no adapters are trained; set their rank, such as lora.r=16, or leave it out"
_DIVERGENCE = "no step learns from the labels; lower the share, name the target 1 too, or leave it out"

RULES: tuple[Rule, ...] = (
    Rule(
        *("model.gguf_file", "model.name_or_path", _is_null("model.name_or_path")),
        "name the folder, or the repository of the Hub, that holds the file",
    ),
    Rule(
        *("model.keep", "model.layers", _is_null("model.layers")),
        "say how many layers are kept, as in model.layers=4",
    ),
    Rule(
        *("model.order", "model.keep", lambda recipe: recipe.model.keep != "order"),
        "layers are kept by an order under model.keep=order alone; set that, or leave it out",
    ),
    Rule(
        *("model.vocab_size", "model.name_or_path"),
        lambda recipe: recipe.model.name_or_path is not None and recipe.model.shape is None,
        "a pretrained model has a tokenizer, and none is trained; leave it out",
    ),
    Rule(
        *("model.vocab_size", "model.tokenizer", _is_set("model.tokenizer")),
        "that tokenizer is used, and none is trained; leave it out",
    ),
    Rule(
        *("model.trust_remote_code", "model.name_or_path"),
        lambda recipe: recipe.model.name_or_path is None and recipe.model.tokenizer is None,
        "no checkpoint is loaded that could bring code; leave it out",
    ),
    *(
        Rule(
            *("schedule.sampling", key, _has_one(key)),
            "with one schedule there is no other to train in the same step; name more, or leave it out",
        )
        for key in ("schedule.speedups", "schedule.files")
    ),
    *(
        Rule(*("schedule.weights", key, _has_one(key)), "there is one schedule alone to draw; leave it out")
        for key in ("schedule.speedups", "schedule.files")
    ),
    Rule(
        *("schedule.weights", "schedule.sampling", _one_between),
        "the slowest and the fastest are in every step, which leaves one at most to draw; leave it out",
    ),
    Rule(
        *("schedule.weights", "schedule.speedup_range", _is_set("schedule.speedup_range")),
        "a range is drawn from evenly; leave it out, or name single targets (schedule.speedups)",
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
        "layers run by an order under schedule.placement=order alone; set that, or leave it out",
    ),
    Rule(
        *("schedule.decay_rate", "schedule.decay", lambda recipe: recipe.schedule.decay not in DEFAULT_RATES),
        f"that decay takes no rate; leave it out, or name one of {', '.join(DEFAULT_RATES)}",
    ),
    Rule(
        # A spread of 0 is what a constant budget has.
        *("schedule.spread", "schedule.decay"),
        lambda recipe: recipe.schedule.decay == "constant" and recipe.schedule.spread != 0,
        "that budget stays as it is; leave it out, or name another decay",
    ),
    Rule(
        *("schedule.prompt_stop", "schedule.speedups", _full_depth_alone),
        "at full depth prompts don't stop; name other targets, or leave it out",
    ),
    Rule(
        *("schedule.default_speedup", "lora.merge"),
        lambda recipe: recipe.lora.r is not None and not recipe.lora.merge,
        "adapters apart have no generation_config.json, where the speed of a whole checkpoint stands; leave it out",
    ),
    Rule(
        *("optim.warmup_steps", "optim.scheduler", _is("optim.scheduler", "constant")),
        "that scheduler has no warm-up; use constant_with_warmup",
    ),
    Rule(
        *("schedule.weights", "schedule.sampling", _is("schedule.sampling", "all")),
        "every target is in every step, and nothing is drawn; leave it out",
    ),
    Rule(
        *("optim.teacher", "optim.distillation", _is("optim.distillation", 0)),
        "no share of the loss is a teacher's; set one, such as optim.distillation=1, or leave it out",
    ),
    Rule("optim.teacher", "optim.exits", _trains_exits, "the last exit teaches the others; leave it out"),
    Rule(
        *("optim.distillation", "schedule.speedups"),
        lambda recipe: _full_depth_alone(recipe) and recipe.optim.teacher is None,
        _ALONE,
    ),
    Rule("optim.depth_weight_power", "schedule.speedups", _full_depth_alone, _ALONE),
    Rule(
        *("optim.depth_weight_power", "schedule.decay", _one_depth),
        "with schedule.prompt 'max' all tokens then run equally many layers, and weigh the same; leave it out",
    ),
    Rule("optim.depth_weight_power", "optim.distillation", _loss_is_all_divergence, _DIVERGENCE),
    Rule("optim.label_smoothing", "optim.distillation", _loss_is_all_divergence, _DIVERGENCE),
    Rule(
        *("train.epochs", "train.max_steps", _is_set("train.max_steps")),
        "the run ends after so many steps, whatever the epochs; leave it out, or set train.max_steps=null",
    ),
    Rule(
        *("train.finish_with", "train.validate_rows", _is("train.validate_rows", 0)),
        "it needs a validation, whose loss says which weights are best, such as train.validate_rows=256",
    ),
    Rule(
        *("train.finish_with", "train.save_steps"),
        lambda recipe: recipe.train.max_steps is not None and recipe.train.save_steps >= recipe.train.max_steps,
        "the only checkpoint is the last one; save more often, such as every tenth of train.max_steps, or leave it out",
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
