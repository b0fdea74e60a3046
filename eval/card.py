"""The model card of a checkpoint, written from what its folder holds."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoConfig, GenerationConfig

from configs.files import read_yaml
from eval.results import FILE_NAME, SPEEDS, Report, Row, show_share, show_speed, show_target, speed_headers
from eval.score.registry import headline, short
from eval.score.scores import not_computable
from skipdecode import ConfigError
from skipdecode.checkpoint.skip_config import DEFAULT_SPEEDUP, SkipConfig
from skipdecode.errors import first_line
from skipdecode.files import write_atomically
from skipdecode.schedule.cost import CostModel

CARD = "README.md"
MARK = "written by skipdecode: remove this line to keep what you change"
EVALUATION = "eval"  # the folder in a checkpoint's
TEMPLATE = Path(__file__).resolve().with_name("card.md")
_DATA = {
    "e2e": ("E2E NLG: restaurants' attributes in words, with several references each.", "tuetschek/e2e_nlg"),
    "webnlg": ("WebNLG 2017: DBpedia's triples in words, with several references.", "webnlg-challenge/web_nlg"),
    "viggo": ("ViGGO: dialogue acts about video games in words, with three references each.", "GEM/viggo"),
    "tldr": ("Reddit TL;DR: posts and their authors' summaries.", "trl-lib/tldr"),
    "cnndm": ("CNN/DailyMail: news articles and their highlights.", "abisee/cnn_dailymail"),
    "departures": ("departures: sentences that a grammar writes from timetables, made by the training code.", None),
    "text": ("Prompts and completions of its author's own.", None),
}


def is_run(folder: Path) -> bool:
    """Say whether a folder holds what a card is written from: the checkpoint of a finished run, and its recipe."""
    return (folder / "config.json").exists() and (folder / "recipe.yaml").exists()


def write_card(folder: Path, repository: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """Write `README.md` into a checkpoint's folder, unless it holds one that somebody changed.

    Args:
        folder: a finished run, with `eval/` in it where it was evaluated.
        repository: its name on the Hub; the folder's own without.
        trust_remote_code: run Python code that the checkpoint brings.

    Returns:
        The card's path.

    Raises:
        ConfigError: where the folder holds no finished run, or an evaluation of something else.
    """
    path = folder / CARD
    if path.exists() and MARK.encode() not in path.read_bytes():
        return path
    if not is_run(folder):
        raise ConfigError(f"{folder} is no finished run: a card is written from its config.json and recipe.yaml")
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    remembered = SkipConfig.of(config)
    if remembered is None or remembered.trained_range is None:
        raise ConfigError(f"{folder} doesn't say what it was trained for: its config.json has no schedules")
    report_file = folder / EVALUATION / FILE_NAME
    report = Report.load(report_file) if report_file.exists() else None
    slowest, fastest = (f"{speedup:g}x" for speedup in remembered.trained_range)
    texts = _read_recipe(folder / "recipe.yaml", remembered, config)
    task = texts["task"]
    values = {
        "mark": MARK,
        "repository": repository or folder.resolve().name,
        "base_model": remembered.base_model,
        "num_layers": CostModel.of(config).num_layers,
        "speeds": f"any speed from {slowest} to {fastest}" if slowest != fastest else slowest,
        "fastest": fastest,
        "usual": f"{sorted(remembered.schedules)[len(remembered.schedules) // 2]:g}",
        "default": _default_speedup(folder),
        "example": json.dumps(remembered.task.get("example", "Your prompt"), ensure_ascii=False),
        "prompt_layers": _prompt_layers(remembered),
        "data": _DATA.get(task, (f"The task {task}.", None))[0],
        "over": _over(report),
        **texts,
        **(_frontier(report, folder) if report is not None else {"rows": []}),
    }
    card = ModelCard.from_template(
        _metadata(task, remembered, report, values["repository"]), template_path=str(TEMPLATE), **values
    )
    write_atomically(path, str(card).strip() + "\n")
    return path


def _over(report: Report | None) -> str:
    """The model whose full depth the speeds are over."""
    if report is None or report.reference is None:
        return "the same model"
    return f"another model, {Path(report.reference).resolve().name}, which the row 1x is of,"


def _prompt_layers(remembered: SkipConfig) -> str:
    """The layers that prompts run, in words."""
    stop, prompt = remembered.solver.get("prompt_stop"), remembered.solver.get("prompt", "full")
    named = {"full": "all layers", "max": "those of the largest budget"}
    layers = named.get(prompt, f"{prompt} layers at most")
    return layers if stop is None else f"the first {stop} of {layers}, and the others read what they gave"


def _default_speedup(folder: Path) -> str | None:
    """The speed of whoever asks for none; None for a checkpoint without one."""
    try:
        speedup = getattr(GenerationConfig.from_pretrained(str(folder)), DEFAULT_SPEEDUP, None)
    except OSError:  # adapters
        return None
    return None if speedup is None else f"{speedup:g}"


def _read_recipe(file: Path, remembered: SkipConfig, config: Any) -> dict[str, str]:
    """The name of a recipe's task, and texts on how it trains. Raises ConfigError where the file isn't a run's."""
    recipe = read_yaml(file)
    try:
        return {
            "task": str(recipe["data"]["task"]),
            "base": _base(recipe, remembered, config),
            "training": _training(recipe, remembered),
            "drawn": _drawn(recipe, remembered),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no run's recipe: {type(error).__name__}: {first_line(error)}") from error


def _base(recipe: dict[str, Any], remembered: SkipConfig, config: Any) -> str:
    if recipe["model"]["name_or_path"] is None:
        return f"A model of the kind {config.model_type}, trained from scratch,"
    if remembered.base_model is None:
        return f"A model of the kind {config.model_type}"
    return f"[{remembered.base_model}](https://huggingface.co/{remembered.base_model})"


def _training(recipe: dict[str, Any], remembered: SkipConfig) -> str:
    steps, rank = recipe["train"]["max_steps"], recipe["lora"]["r"]
    length = f"{recipe['train']['epochs']:g} epochs" if steps is None else f"{steps} steps"
    known = remembered.base_model or "a checkpoint of its author's"
    start = "from random weights" if recipe["model"]["name_or_path"] is None else f"from {known}"
    how = f"LoRA of rank {rank}" if rank is not None else "every weight"
    return f"Trained {start} for {length} at a learning rate of {recipe['optim']['learning_rate']:g}, {how}."


def _drawn(recipe: dict[str, Any], remembered: SkipConfig) -> str:
    if len(remembered.schedules) == 1:
        return f"one schedule, for {next(iter(remembered.schedules)):g}x"
    drawn = {"sandwich": "the slowest, the fastest and one more", "all": "all of them"}
    number = drawn.get(recipe["schedule"]["sampling"], "one")
    return f"{number} of {len(remembered.schedules)} schedules, drawn anew"


def _frontier(report: Report, folder: Path) -> dict[str, Any]:
    metrics = short(report.rows[0].scores)[:5]
    agreement = ["agreement"] if any(row.agreement for row in report.rows) else []
    picture = Path(EVALUATION, "frontier.png")

    def cells(row: Row) -> list[str]:
        scores = [f"{row.scores[metric.name]:.2f}" for metric in metrics]
        if metrics[0].name in row.intervals:
            low, high = row.intervals[metrics[0].name]
            scores[0] += f" [{low:.1f}, {high:.1f}]"
        asked = show_target(row.speedup_target, row.planned_speedup)
        speeds = [asked, str(row.speed("decode")), show_speed(row.whole_speedup)]
        agreeing = [show_share(row.agreeing) for _ in agreement]
        return [row.label, f"{row.mean_layers:.2f} of {row.num_layers}", *speeds, *scores, *agreeing]

    return {
        "heads": [
            "row",
            "layers",
            "asked",
            *speed_headers(report.over),
            *(metric.label for metric in metrics),
            *agreement,
        ],
        "rows": [cells(row) for row in report.rows],
        "measured": f"{report.examples} test prompts of {report.task}, batch {report.batch_size}, {report.dtype}, "
        f"{report.machine.get('processor', report.device)}, torch {report.versions.get('torch', '?')}, "
        f"{report.date}; intervals of scores are of 95 %. {' '.join([report.speed_note(), *report.planned_notes()])}",
        "not_computable": not_computable(report.unavailable),
        "picture": picture.as_posix() if (folder / picture).exists() else None,
    }


def _metadata(task: str, remembered: SkipConfig, report: Report | None, repository: str) -> ModelCardData:
    dataset = _DATA.get(task, ("", None))[1]
    results = []
    over, measured = (report.over, report.task) if report is not None else ("decode", task)
    # A reference's row says nothing of this model.
    own = [row for row in report.rows if row.checkpoint == report.checkpoint] if report is not None else []
    for row in own:
        metric = headline(row.scores)
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=_DATA.get(measured, ("", None))[1] or measured,
                dataset_name=measured,
                metric_type=metric.name,
                metric_value=round(row.scores[metric.name], 2),
                metric_name=f"{metric.label} at {row.label} (measured {SPEEDS[over]}: {row.speed(over).median:.2f}x)",
            )
        )
    return ModelCardData(
        base_model=remembered.base_model,
        datasets=[dataset] if dataset is not None else None,
        eval_results=results or None,
        model_name=repository,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["skipdecode", "layer-skipping", "custom_generate"],
    )
