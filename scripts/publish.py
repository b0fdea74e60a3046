"""Publish a finished run on the Hugging Face Hub.

    python scripts/publish.py outputs/e2e-tiny me/e2e-tiny --evaluation outputs/e2e-eval --dry-run

Checks the folder, writes its model card and its custom_generate, shows what will be sent and asks. Private unless
--public is said. Of a run it sends the model, its tokenizer, the recipe, the card and the evaluation, never the
optimiser's state, the tracker's files or predictions, and nothing where a file holds what looks like a key. It is one
commit: interrupted, nothing has changed, and the same command goes on; repeated, nothing is sent twice. It wants a
token with write access (`hf auth login`, or HF_TOKEN). The card is yours to edit: remove the line in it that says who
wrote it.
"""

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from skipdecode.cli.process import run_command
from skipdecode.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a finished run's folder")
    parser.add_argument("repository", help="OWNER/NAME on the Hub")
    parser.add_argument("--evaluation", type=Path, metavar="DIR", help="what `python -m eval --output DIR` wrote")
    parser.add_argument("--public", action="store_true", help="a new repository may be seen by all")
    parser.add_argument("--tag", help="for the commit, such as v1.0")
    parser.add_argument("--message", help="of the commit")
    parser.add_argument("--dry-run", action="store_true", help="check and show, send nothing")
    parser.add_argument("--yes", action="store_true", help="don't ask")
    options = parser.parse_args()
    return publish(options)


def publish(options: argparse.Namespace) -> int:
    """Check, show, ask, send."""
    from eval.output import only_writer  # here: it takes seconds, and a mistyped option should not

    with only_writer(options.checkpoint, "the checkpoint"):
        return _publish(options)


def _publish(options: argparse.Namespace) -> int:
    from transformers.utils import logging  # here: they take seconds, and a mistyped option should not

    from train.publish.parcel import describe, pack
    from train.publish.send import send

    logging.disable_progress_bar()

    if options.evaluation is not None:
        _take(options.evaluation, options.checkpoint / "eval", options.checkpoint)
    parcel = pack(options.checkpoint, options.repository)
    for line in describe(parcel):
        print(line)
    print("public" if options.public else "private, where it is new", flush=True)
    if options.dry_run:
        print("a dry run; nothing was sent")
        return 0
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody is there to ask: say --yes to send it")
        if input("send it? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was sent")
            return 0
    print(send(parcel, public=options.public, tag=options.tag, message=options.message))
    return 0


def _take(evaluation: Path, target: Path, checkpoint: Path) -> None:
    """Copy an evaluation of this checkpoint into its folder, in place of the one that is there."""
    from eval.results import FILE_NAME, Report

    report = Report.load(evaluation / FILE_NAME)
    if Path(report.checkpoint).resolve() != checkpoint.resolve():
        raise ConfigError(f"--evaluation {evaluation} is of {report.checkpoint}, not of {checkpoint}")
    if target.resolve() == evaluation.resolve():
        return
    names = (FILE_NAME, "report.md", "frontier.png")
    for name in names:
        if not (evaluation / name).is_file():
            raise ConfigError(f"--evaluation {evaluation} has no {name}: name what `python -m eval` wrote, all of it")
    target.mkdir(exist_ok=True)
    shutil.rmtree(target / "predictions", ignore_errors=True)  # texts of the one that was there
    if (evaluation / "predictions").is_dir():
        shutil.copytree(evaluation / "predictions", target / "predictions", symlinks=True)
    for name in names:
        (target / name).unlink(missing_ok=True)
        shutil.copyfile(evaluation / name, target / name, follow_symlinks=False)  # a link is refused as one


if __name__ == "__main__":
    sys.exit(run_command(main))
