"""The command line of training: `python train.py --recipe NAME [key=value …]`, or under torchrun."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from skipdecode.cli.process import run_command
from train.recipe import Recipe, load_recipe, recipe_names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe and return the exit status.

    The status is that of `run_command`, or 1 where the run can't continue (such as a loss that isn't finite), or 143
    after SIGTERM. The error message of an interrupted run names the checkpoint to resume from.
    """
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Fine-tune a decoder under sampled skip schedules, so that it decodes faster in wall-clock time.",
        epilog=_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--recipe", required=True, metavar="NAME", help=f"a recipe ({', '.join(recipe_names())}) or a YAML file")
    add("overrides", nargs="*", metavar="key=value", help="settings to change, such as optim.learning_rate=1e-4")
    dry_run_help = (
        "build everything, run the largest and a few other steps, print the time and memory needed, save nothing"
    )
    add("--dry-run", action="store_true", help=dry_run_help)
    options = parser.parse_intermixed_args(arguments)
    return run_command(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    recipe = load_recipe(options.recipe, options.overrides)
    # Imported here, because it takes seconds: a mistyped key is reported at once.
    from eval.processes import leave_group_at_exit
    from train.checkpoints import resume_advice

    leave_group_at_exit()
    folder = Path(str(recipe.output.dir))
    return run_command(lambda: _train(recipe, options), left=lambda: resume_advice(folder))


def _train(recipe: Recipe, options: argparse.Namespace) -> int:
    from train.progress import quiet_libraries
    from train.stops import RunStopped

    quiet_libraries(with_deepspeed=recipe.deepspeed.config is not None)
    try:
        if options.dry_run:
            from train.dry_run.rehearsal import dry_run, print_dry_run

            print_dry_run(dry_run(recipe), options.recipe)
        else:
            from train.run import run

            run(recipe, options.recipe)
    except RunStopped as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        return stop.status
    return 0


def _keys() -> str:
    """The help on every key of a recipe, with its default."""
    lines = ["recipe keys:"]
    for section_name, section in Recipe.model_fields.items():
        kind = section.annotation
        assert kind is not None
        lines.append(f"\n  {section_name}: {' '.join((kind.__doc__ or '').split())}")
        for key, field in kind.model_fields.items():
            default = "(required)" if field.is_required() else f"= {json.dumps(field.default)}"
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            notes = [", ".join(choices), field.description or ""]
            lines.append(f"    {section_name}.{key} {default}  {'; '.join(filter(None, notes))}".rstrip())
    return "\n".join(lines)
