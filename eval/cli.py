"""The command line of evaluation: `python -m eval --checkpoint DIR --speedup 1 2 3 4 --output DIR`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError

_DESCRIPTION = """\
Decode a test set at several speedups and measure quality and speed; write report.json, report.md, predictions/ and
frontier.png. An interrupted evaluation continues when it is started again with the same options. Under torchrun the
processes share the prompts, and the first one writes the report.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint. Returns the exit status, as `run_command` does."""
    options = vars(_parser().parse_args(arguments))
    return run_command(lambda: _evaluate(options), left=lambda: "run the same command again to continue")


def _evaluate(options: dict[str, Any]) -> None:
    compare = _named_paths(options.pop("compare"))
    from eval.processes import join_processes  # imported here, after options are parsed: it takes seconds
    from eval.request import Request
    from eval.run import run_process
    from eval.score.bertscore import bert_model

    tuples = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    bert = bert_model(options.pop("bertscore_model"), options.pop("bertscore_layers"))
    request = Request(**{**options, **tuples, "compare": compare, "bert": bert})
    run_process(request, join_processes(share_model=request.tensor_parallel))


def _named_paths(pairs: Sequence[str]) -> dict[str, Path]:
    named = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--compare {pair!r}: expected NAME=PATH, where PATH is a report.json")
        if name in named:
            raise ConfigError(f"--compare names {name!r} twice: give each report its own name")
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
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="the folder of a finished run, or a Hub name"
    )
    add_gguf_file(parser)
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="the output folder; it must not hold a report"
    )
    _add_data(parser)
    _add_systems(parser)
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="B", help="number of prompts decoded together (default 32)"
    )
    parser.add_argument(
        "--time-batch-size",
        dest="time_batch_sizes",
        nargs="+",
        type=int,
        default=[],
        metavar="B",
        help="batch sizes for measuring speed, on prompts drawn evenly from the test set (default: --batch-size)",
    )
    parser.add_argument(
        "--time-limit",
        type=int,
        metavar="N",
        help="number of prompts for measuring speed (default 24 or 8 batches); fewer than 5 batches are repeated",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    parser.add_argument(
        "--weights",
        choices=["model", "packed", "int8", "int4", "int4-int8-head", "int8-int4-head"],
        help="weight format of prefill and decode, as in skip_generate (8 and 4 bits on CPU, with 8-bit activations)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that a checkpoint contains")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; default: cuda if available, with one GPU per process")
    parser.add_argument(
        "--device-map",
        metavar="MAP",
        help="spread the layers of a model that is too large for one GPU over several GPUs, as in transformers: auto, "
        "balanced, sequential",
    )
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="split each layer over torchrun's processes, by the model's tensor-parallel plan in transformers; they "
        "decode every batch together",
    )
    parser.add_argument(
        "--metrics", nargs="+", metavar="NAME", help="default: those of the task (bleu, nist, rougeL, …)"
    )
    add_tokenizer(parser)
    add_bertscore(parser)
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="NAME=REPORT",
        help="other report.json files to include in the picture",
    )
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add_task(group)
    group.add_argument(
        "--split",
        choices=["train", "validation", "test"],
        default="test",
        help="the split to decode (default test); with train, the predictions of a fine-tuned model can be targets for "
        "another (data.completions in a recipe)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts of the split")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="default: that of the task")


def add_gguf_file(parser: argparse._ActionsContainer) -> None:
    """Add the option for a GGUF file."""
    parser.add_argument(
        "--gguf-file", metavar="FILE", help="read model and tokenizer from this GGUF file in the checkpoint folder"
    )


def add_task(parser: argparse._ActionsContainer) -> None:
    """Add the options of the task."""
    add = parser.add_argument
    add("--task", help="default: the task that the checkpoint was trained on")
    add("--data-dir", metavar="DIR", help="a local folder with the data of the task; default: the Hub, or built in")
    add(
        "--task-option",
        dest="task_options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="change options of the task that the checkpoint was trained with, such as prompt_column=question",
    )


def add_strict(parser: argparse._ActionsContainer) -> None:
    """Add the option that fails on unreachable targets."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail on a target that can't be reached; by default the fastest schedule that the checkpoint was trained "
        "for is used, and the report marks the row",
    )


def add_tokenizer(parser: argparse._ActionsContainer) -> None:
    """Add the option for the tokenizer of metrics."""
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="a tokenizer of sacrebleu for BLEU, NIST, ROUGE and CIDEr: intl (any language with spaces between words), "
        "zh, ja-mecab, ko-mecab, flores101, flores200 (downloads a model once), char, 13a, none (split at spaces); "
        "default: each metric's own tokenizer, designed for English",
    )


def add_bertscore(parser: argparse._ActionsContainer) -> None:
    """Add the options for the model of BERTScore."""
    parser.add_argument(
        "--bertscore-model", metavar="MODEL", help="compute BERTScore with this model: a folder or a Hub name"
    )
    parser.add_argument(
        "--bertscore-layers",
        type=int,
        metavar="N",
        help="layer for BERTScore; default: that of bert-score for the model",
    )


def _add_systems(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("systems", "All systems take turns with full depth on each batch.")
    group.add_argument(
        "--speedup",
        dest="speedups",
        nargs="+",
        type=float,
        default=[],
        metavar="X",
        help="target wall-clock speedups; 1x is added (default: those that the checkpoint was trained for, or 1 2 3 4 "
        "if there are more than five; none with --reference or --calm-threshold; an exported checkpoint has a single "
        "speedup)",
    )
    group.add_argument(
        "--over",
        choices=["decode", "all"],
        help="the speedup that targets apply to: decode, or all: end-to-end (prefill + decode); default: as in "
        "training. Both are measured",
    )
    add_strict(group)
    group.add_argument(
        "--schedule",
        dest="schedules",
        nargs="+",
        default=[],
        metavar="FILE",
        help="additional schedules: JSON files, whose names become the names of the rows",
    )
    group.add_argument(
        "--lossless",
        nargs="+",
        type=_draft,
        default=[],
        metavar="X|auto",
        help="self-speculative decoding, whose output is identical to full depth, with drafts at these speedups; auto: "
        "choose the best draft depth",
    )
    group.add_argument(
        "--order",
        metavar="FILE",
        help="with --lossless auto: draft with the first layers of this order, from `skipdecode order`; the model "
        "doesn't have to be trained for skipping",
    )
    group.add_argument(
        "--agreement",
        action="store_true",
        help="measure the agreement with full depth by output position: a quality measure without references",
    )
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="measure a profile of this machine and solve the targets with it, for this evaluation only (skipdecode "
        "calibrate saves a profile)",
    )
    group.add_argument(
        "--system",
        choices=["skip", "calm"],
        default="skip",
        help="skip (default): layer skipping with schedules. calm: confidence exits (CALM), with the threshold "
        "calibrated on validation data to the mean layers of the target's schedule",
    )
    group.add_argument(
        "--calm-threshold",
        dest="calm_thresholds",
        nargs="+",
        type=float,
        default=[],
        metavar="L",
        help="exit thresholds instead of targets: at 0 tokens exit after the first layer, above 1 after the last",
    )
    group.add_argument(
        "--reference",
        metavar="DIR",
        help="measure speedups relative to this model at full depth, for example to evaluate a shallower checkpoint",
    )
