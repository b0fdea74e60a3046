"""What a trained checkpoint holds beside its weights."""

import os
from pathlib import Path

from skipdecode.checkpoint.remote_code import write_custom_generate
from skipdecode.checkpoint.skip_config import SkipConfig, save_default_speedup
from skipdecode.training.sampling import default_speedup


def save_skip_files(folder: str | os.PathLike[str], config: SkipConfig, speedup: float | None = None) -> None:
    """Add to a checkpoint of transformers, or to a folder of adapters, what decoding with layers skipped needs.

    That is the schedules and, beside a complete model, the speedup at which it decodes by default and
    `custom_generate/`, with which transformers decodes without this package.

    Args:
        folder: where `save_pretrained` wrote the model.
        config: the schedules and the settings that they were solved with.
        speedup: see `default_speedup`.

    Raises:
        ConfigError: as `default_speedup` does.
    """
    config.save(folder)
    if (Path(folder) / "config.json").exists():
        write_custom_generate(folder)
        save_default_speedup(folder, default_speedup(speedup, config.schedules))
