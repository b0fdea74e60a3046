"""The command line of evaluation: `python -m eval --checkpoint DIR --speedup 1 2 3 4 --output DIR`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from skipdecode.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint. Returns the exit status: 0, or 2 after a one-line error for what the user must change."""
    parser = argparse.ArgumentParser(
        prog="python -m eval",
        description="Decode a test set at several speeds; write report.json, report.md, predictions/ and frontier.png.",
        epilog="example: python -m eval --checkpoint outputs/e2e-tiny --data-dir E2E --speedup 1 2 3 4 --output out",
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a finished run's folder, or a Hub name")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder that holds no report")
    parser.add_argument("--task", help="default: what the checkpoint was trained on")
    parser.add_argument("--data-dir", metavar="DIR", help="the task's local folder; default: the Hub, or built in")
    parser.add_argument(
        "--speedup",
        nargs="+",
        type=float,
        default=[1, 2, 3, 4],
        metavar="X",
        help="target wall-clock speedups; 1x is added",
    )
    parser.add_argument(
        "--schedule", nargs="+", default=[], metavar="FILE", help="schedules of your own beside the targets: JSON files"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of the test set")
    parser.add_argument("--batch-size", type=int, default=32, metavar="B", help="prompts decoded together (default 32)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: the task's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    parser.add_argument(
        "--weights",
        choices=["model", "packed", "int8"],
        help="what decode steps compute with, as in skip_generate (int8: 8-bit weights and activations, on CPU)",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="solve the targets anew for this machine's clock, in place of the schedules that were trained under",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; default: cuda where there is one")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="NAME=REPORT", help="other report.json files to draw in the picture"
    )
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="default: the task's (bleu, nist, rougeL, …)")
    parser.add_argument("--bertscore-model", metavar="MODEL", help="score with BERTScore too: a folder or a Hub name")
    parser.add_argument("--bertscore-layers", type=int, metavar="N", help="default: bert-score's for that model")
    options = parser.parse_args(arguments)
    try:
        compare = {}
        for pair in options.compare:
            name, equals, path = pair.partition("=")
            if not equals:
                raise ConfigError(f"--compare {pair!r}: expected NAME=PATH of a report.json")
            compare[name] = Path(path)
        from eval.bertscore import bert_model
        from eval.run import Request, evaluate  # here: it takes seconds, and a mistyped option should not

        evaluate(
            Request(
                checkpoint=options.checkpoint,
                output=options.output,
                speedups=tuple(options.speedup),
                schedules=tuple(options.schedule),
                task=options.task,
                data_dir=options.data_dir,
                limit=options.limit,
                batch_size=options.batch_size,
                max_new_tokens=options.max_new_tokens,
                dtype=options.dtype,
                weights=options.weights,
                calibrate=options.calibrate,
                device=options.device,
                compare=compare,
                metrics=tuple(options.metrics) if options.metrics else None,
                bert=bert_model(options.bertscore_model, options.bertscore_layers),
            )
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
