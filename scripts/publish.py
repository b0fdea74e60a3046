"""Publish a finished run on the Hugging Face Hub.

    python scripts/publish.py outputs/e2e-tiny me/e2e-tiny --evaluation outputs/e2e-eval --dry-run

The script checks the folder, writes its model card and its custom_generate, lists the files to send and asks for
confirmation. A new repository is private unless --public is given. It sends the model, its tokenizer, the recipe, the
card and the evaluation, never the optimiser's state, the tracker's files or predictions, and nothing at all if a file
seems to contain a key. Everything is one commit: an interrupted upload changes nothing and is continued by the same
command, and files on the Hub are not sent twice. It needs a token with write access (`hf auth login`, or HF_TOKEN). To
edit the card, remove its line that says who wrote it; it is then kept as it is.
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
    parser.add_argument("--evaluation", type=Path, metavar="DIR", help="the folder of `python -m eval --output DIR`")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument("--tag", help="tag of the commit, such as v1.0")
    parser.add_argument("--message", help="message of the commit")
    parser.add_argument("--dry-run", action="store_true", help="check and list the files, send nothing")
    parser.add_argument("--yes", action="store_true", help="don't ask for confirmation")
    options = parser.parse_args()
    from eval.output import only_writer  # imported here, because it takes seconds

    with only_writer(options.checkpoint, "the checkpoint"):
        return _publish(options)


def _publish(options: argparse.Namespace) -> int:
    """Check the checkpoint, list its files, ask and send."""
    from transformers.utils import logging

    from train.publish.parcel import describe, pack
    from train.publish.send import send

    logging.disable_progress_bar()

    if options.evaluation is not None:
        _copy_evaluation(options.evaluation, options.checkpoint / "eval", options.checkpoint)
    parcel = pack(options.checkpoint, options.repository)
    for line in describe(parcel):
        print(line)
    print("a new repository will be public" if options.public else "a new repository will be private", flush=True)
    if options.dry_run:
        print("dry run, nothing was sent")
        return 0
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError("there is no terminal to ask for confirmation: pass --yes to send without it")
        if input("send it? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was sent")
            return 0
    print(send(parcel, public=options.public, tag=options.tag, message=options.message))
    return 0


def _copy_evaluation(evaluation: Path, target: Path, checkpoint: Path) -> None:
    """Copy an evaluation of this checkpoint into its folder, replacing the one there."""
    from eval.results import FILE_NAME, Report

    report = Report.load(evaluation / FILE_NAME)
    if Path(report.checkpoint).resolve() != checkpoint.resolve():
        raise ConfigError(f"--evaluation {evaluation} is of {report.checkpoint}, not of {checkpoint}")
    if target.resolve() == evaluation.resolve():
        return
    names = (FILE_NAME, "report.md", "frontier.png")
    for name in names:
        if not (evaluation / name).is_file():
            raise ConfigError(
                f"--evaluation {evaluation} has no {name}: it must be a complete folder of `python -m eval`"
            )
    target.mkdir(exist_ok=True)
    shutil.rmtree(target / "predictions", ignore_errors=True)  # those of the replaced evaluation
    if (evaluation / "predictions").is_dir():
        shutil.copytree(evaluation / "predictions", target / "predictions", symlinks=True)
    for name in names:
        (target / name).unlink(missing_ok=True)
        shutil.copyfile(evaluation / name, target / name, follow_symlinks=False)  # `pack` then refuses a link


if __name__ == "__main__":
    sys.exit(run_command(main))
