"""The command line of evaluation: `python -m eval --checkpoint DIR --speedup 1 2 3 4 --output DIR`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError

_DESCRIPTION = """\
Decode a test set at several speeds; write report.json, report.md, predictions/ and frontier.png. An evaluation that was
cut off goes on when it is started again with the same options. Under torchrun the processes share the prompts, and the
first one writes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    return run_command(lambda: _evaluate(options), left=lambda: "the same command goes on")


def _evaluate(options: dict[str, Any]) -> None:
    compare = _named_paths(options.pop("compare"))
    from eval.processes import join_processes  # here: they take seconds, and a mistyped option should not
    from eval.request import Request
    from eval.run import take_part
    from eval.score.bertscore import bert_model

    tuples = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    bert = bert_model(options.pop("bertscore_model"), options.pop("bertscore_layers"))
    request = Request(**{**options, **tuples, "compare": compare, "bert": bert})
    take_part(request, join_processes(share_model=request.tensor_parallel))


def _named_paths(pairs: Sequence[str]) -> dict[str, Path]:
    named = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--compare {pair!r}: expected NAME=PATH of a report.json")
        if name in named:
            raise ConfigError(f"--compare names {name!r} twice: give each report a name of its own")
        named[name] = Path(path)
    return named


def _draft(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _parser() -> argparse.ArgumentParser:
    """Each option's `dest` is a field of eval.request.Request."""
    parser = argparse.ArgumentParser(
        prog="python -m eval",
        description=_DESCRIPTION,
        epilog="examples:\n"
        "  python -m eval --checkpoint outputs/e2e-tiny --data-dir E2E --speedup 1 2 3 4 --output out\n"
        "  torchrun --nproc_per_node 8 -m eval --checkpoint outputs/e2e-tiny --data-dir E2E --output out",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a finished run's folder, or a Hub name")
    add_gguf_file(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder that holds no report")
    _add_what(parser)
    _add_systems(parser)
    parser.add_argument("--batch-size", type=int, default=32, metavar="B", help="prompts decoded together (default 32)")
    parser.add_argument(
        "--time-batch-size",
        dest="time_batch_sizes",
        nargs="+",
        type=int,
        default=[],
        metavar="B",
        help="batch sizes to take the speeds at, on prompts drawn evenly from the test set (default: --batch-size)",
    )
    parser.add_argument(
        "--time-limit",
        type=int,
        metavar="N",
        help="how many prompts that is (default 24, or 8 batches); fewer than 5 batches are timed several times",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    parser.add_argument(
        "--weights",
        choices=["model", "packed", "int8", "int4", "int4-int8-head", "int8-int4-head"],
        help="what prompts and steps compute with, as in skip_generate (8 and 4 bits on CPU, activations in 8 bits)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that a checkpoint brings")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one, or one a process")
    parser.add_argument(
        "--device-map",
        metavar="MAP",
        help="spread the layers of a model that is too large for one GPU over several, as transformers does: auto, "
        "balanced, sequential",
    )
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="share each layer among torchrun's processes, by the plan that transformers has for the model: they "
        "decode every batch together",
    )
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="default: the task's (bleu, nist, rougeL, …)")
    add_tokenizer(parser)
    parser.add_argument("--bertscore-model", metavar="MODEL", help="score with BERTScore too: a folder or a Hub name")
    parser.add_argument("--bertscore-layers", type=int, metavar="N", help="default: bert-score's for that model")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="NAME=REPORT", help="other report.json files to draw in the picture"
    )
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is decoded")
    add_task(group)
    group.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of the test set")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the task's")


def add_gguf_file(parser: argparse._ActionsContainer) -> None:
    """The option that names a GGUF file of the checkpoint."""
    parser.add_argument("--gguf-file", metavar="FILE", help="read model and tokenizer from this GGUF file in it")


def add_task(parser: argparse._ActionsContainer) -> None:
    """The options that name a task."""
    add = parser.add_argument
    add("--task", help="default: what the checkpoint was trained on")
    add("--data-dir", metavar="DIR", help="the task's local folder; default: the Hub, or built in")
    add(
        "--task-option",
        dest="task_options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="options of the task beside or in place of those that the checkpoint was trained with, such as "
        "prompt_column=question",
    )


def add_strict(parser: argparse._ActionsContainer) -> None:
    """The option that refuses what can't be reached."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a target that can't be reached; without it the fastest schedule that the checkpoint was trained "
        "for decodes, and the report marks the row",
    )


def add_tokenizer(parser: argparse._ActionsContainer) -> None:
    """The option that names the words of metrics."""
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="count the words of one of sacrebleu's tokenizers in BLEU, NIST, ROUGE and CIDEr: intl (any language with "
        "spaces between words), zh, ja-mecab, ko-mecab, flores101, flores200 (downloads a model once), char, 13a, none "
        "(spaces alone); default: each metric's own words, which are made for English",
    )


def _add_systems(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how", "What is named here takes turns with full depth on each batch.")
    group.add_argument(
        "--speedup",
        dest="speedups",
        nargs="+",
        type=float,
        default=[],
        metavar="X",
        help="target wall-clock speedups; 1x is added (default: those that the checkpoint was trained for, of many 1 2 "
        "3 4; none with --reference or --calm-threshold; an exported checkpoint has one speed alone)",
    )
    group.add_argument(
        "--over",
        choices=["decode", "all"],
        help="what targets are of: decoding, or prompt and decoding together (default: what the checkpoint was trained "
        "for); both speeds are measured",
    )
    add_strict(group)
    group.add_argument(
        "--schedule",
        dest="schedules",
        nargs="+",
        default=[],
        metavar="FILE",
        help="schedules of your own beside the targets: JSON files, whose names the rows get",
    )
    group.add_argument(
        "--lossless",
        nargs="+",
        type=_draft,
        default=[],
        metavar="X|auto",
        help="full depth's own texts, drafted at these speedups and verified; auto: drafted by as many layers as pay",
    )
    group.add_argument(
        "--order",
        metavar="FILE",
        help="with --lossless auto: the layers of an order draft (skipdecode order finds one), also of a model that "
        "wasn't trained to skip",
    )
    group.add_argument(
        "--agreement",
        action="store_true",
        help="count the tokens that full depth would have chosen, by place in the text: a quality without references",
    )
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine's clock for this evaluation, and solve the targets for it (skipdecode calibrate "
        "measures it once for all)",
    )
    group.add_argument(
        "--system",
        choices=["skip", "calm"],
        default="skip",
        help="skip (default): targets are schedules. calm: confidence exits (CALM), as many layers per token as the "
        "target's schedule, by a threshold that is found on validation data",
    )
    group.add_argument(
        "--calm-threshold",
        dest="calm_thresholds",
        nargs="+",
        type=float,
        default=[],
        metavar="L",
        help="confidences at which tokens leave, in place of targets: 0 is the first layer, above 1 the last",
    )
    group.add_argument(
        "--reference",
        metavar="DIR",
        help="measure against this model's full depth: what a shallower checkpoint, or one trained otherwise, gains",
    )
