"""train.py with what each process draws written down: `draws_logged.py FOLDER --recipe NAME …`, under a launcher."""

import json
import os
import sys
from pathlib import Path

from skipdecode.training.sampling import Draw, ScheduleSampler
from train.cli import main


def log_draws(folder: Path) -> None:
    """From now on a line goes to `folder/RANK.jsonl` for each call: the step, the targets and the schedules."""
    at = ScheduleSampler.at

    def logged(self: ScheduleSampler, step: int) -> tuple[Draw, ...]:
        draws = at(self, step)
        line = [step, [[draw.speedup, draw.schedule.to_dict()] for draw in draws]]
        with (folder / f"{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        return draws

    ScheduleSampler.at = logged  # type: ignore[method-assign]


if __name__ == "__main__":
    log_draws(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
