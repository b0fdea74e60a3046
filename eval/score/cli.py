"""The command line of scores for existing predictions: `python -m eval.score --predictions FILE.jsonl --task e2e`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data import TASKS, Task, load_task
from data.task import Convention
from eval.cli import add_bertscore, add_tokenizer
from eval.console import make_console
from eval.output import check_new_files
from eval.score.bertscore import bert_model, load_scorer
from eval.score.bootstrap import SIGNIFICANT
from eval.score.metric import BertModel
from eval.score.outputs import SUFFIXES, read_any
from eval.score.predictions import Prediction, matched
from eval.score.registry import metric_named
from eval.score.scores import NOT_COMPUTABLE, Scores, check_some, choose_metrics, not_computable, score
from eval.score.tokenizers import check_tokenizer, load_tokenizer
from eval.tables import Table
from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError, unknown
from skipdecode.files import write_atomically


def main(arguments: Sequence[str] | None = None) -> int:
    """Score a file of predictions. Returns the exit status, as `run_command` does."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.score",
        description="Score the predictions of any system: JSON lines with id, prompt, prediction and references; or "
        "the outputs of a challenge in the order of a task's test split, as a .txt file with one output per line or a "
        ".tsv file with a header, meaning representations and outputs.",
        epilog="examples: python -m eval.score --predictions system.jsonl --task e2e --output scores.json; "
        "python -m eval.score --predictions melbourne.txt --task webnlg --data-dir WEBNLG_FOLDER --output scores.json",
    )
    parser.add_argument("--predictions", required=True, type=Path, metavar="FILE", help="the predictions to score")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="a new .json file")
    parser.add_argument("--task", help=f"task that selects the metrics and the rules of BLEU: {', '.join(TASKS)}")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="a local folder with the data of the task, for .txt and .tsv files; default: the Hub",
    )
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="metrics to compute; default: those of the task")
    add_tokenizer(parser)
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="predictions of another system for the same items, to compare with"
    )
    add_bertscore(parser)
    options = vars(parser.parse_args(arguments))
    return run_command(lambda: _run(ScoreRequest(**options)), left=lambda: f"{options['output']} was not written")


@dataclass(frozen=True)
class ScoreRequest:
    """The options of `python -m eval.score`.

    Raises ConfigError where neither a task nor metrics are given, and for an output that can't be written.
    """

    predictions: Path
    output: Path
    task: str | None = None
    metrics: Sequence[str] | None = None
    against: Path | None = None
    data_dir: str | None = None
    bertscore_model: str | None = None
    bertscore_layers: int | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.task is None and self.metrics is None:
            raise ConfigError("--task is missing: give a task, which selects the metrics, or --metrics")
        if self.task is not None and self.task not in TASKS:
            raise unknown("task", self.task, TASKS)
        check_tokenizer(self.tokenizer)
        if not self.output.resolve().parent.is_dir():
            raise ConfigError(f"--output {self.output}: the folder {self.output.parent} doesn't exist")
        check_new_files("--output", self.output)


def _run(request: ScoreRequest) -> None:
    bert = bert_model(request.bertscore_model, request.bertscore_layers)
    own = TASKS[request.task] if request.task is not None else Task
    metrics = choose_metrics(own.metrics, request.metrics, bert)
    task = _task_of(request)
    found = read_any(request.predictions, task)
    others = matched(found, read_any(request.against, task)) if request.against is not None else None
    if bert is not None:
        load_scorer(bert)
    if request.tokenizer is not None:
        load_tokenizer(request.tokenizer)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=make_console(stderr=True)) as progress:
        progress.add_task(f"scoring {len(found):,} predictions")
        how: Any = {"bert": bert, "convention": own.convention, "tokenizer": request.tokenizer}
        baseline = _score(others, metrics, **how) if others is not None else None
        scores = _score(list(found.values()), metrics, **how, against=baseline)
    check_some(scores.unavailable, metrics)
    write_atomically(
        request.output, json.dumps(_as_json(scores, baseline, request), indent=2, ensure_ascii=False) + "\n"
    )
    console = make_console()
    console.print(_table(scores, baseline).to_rich())
    for sentence in not_computable(scores.unavailable):
        console.print(sentence, style="dim", soft_wrap=True)


def _task_of(request: ScoreRequest) -> Task | None:
    """The task whose examples are needed; None for JSON lines, which are complete, and without --task."""
    if {file.suffix for file in (request.predictions, request.against) if file is not None} & SUFFIXES.keys():
        return load_task(request.task, path=request.data_dir) if request.task is not None else None
    return None


def _score(
    lines: Sequence[Prediction],
    metrics: Sequence[str],
    *,
    bert: BertModel | None,
    convention: Convention,
    tokenizer: str | None,
    against: Scores | None = None,
) -> Scores:
    return score(
        [line.prediction for line in lines],
        [line.references for line in lines],
        metrics,
        meanings=[line.meaning or line.prompt for line in lines],
        bert=bert,
        against=against,
        convention=convention,
        tokenizer=tokenizer,
        parts=[line.part for line in lines],
    )


def _as_json(scores: Scores, against: Scores | None, request: ScoreRequest) -> dict[str, Any]:
    result: dict[str, Any] = {
        **scores.values,
        **dict.fromkeys(scores.unavailable),  # null; the reasons are in "unavailable"
        "intervals": scores.intervals,
        "metrics": scores.metrics,
        "unavailable": scores.unavailable,
        "items": scores.items,
        "predictions": str(request.predictions),
        "task": request.task,
        "tokenizer": request.tokenizer,
    }
    if against is not None:
        result["p_values"] = scores.p_values
        result["against"] = {"predictions": str(request.against), **against.values, "intervals": against.intervals}
    return result


def _table(scores: Scores, against: Scores | None) -> Table:
    headers = [
        "metric",
        "score",
        "95 % interval",
        *(["against", "difference", "p value"] if against is not None else []),
    ]
    rows = []
    for name, value in scores.values.items():
        show = metric_named(name).show
        spread = "[{}, {}]".format(*map(show, scores.intervals[name])) if name in scores.intervals else ""
        cells = [name, show(value), spread]
        if against is not None:
            other = against.values.get(name)
            p = scores.p_values.get(name, 1.0)
            star = "*" if p < SIGNIFICANT else ""
            cells += (
                ["", "", ""]
                if other is None
                else [show(other), f"{'+' if value >= other else ''}{show(value - other)}", f"{p:.3f}{star}"]
            )
        rows.append(cells)
    rows += [[name, NOT_COMPUTABLE, *[""] * (len(headers) - 2)] for name in scores.unavailable]
    return Table(headers, rows, f"{scores.items:,} predictions", left=1)
