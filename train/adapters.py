"""LoRA adapters around a model, and back into it."""

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from skipdecode.checkpoint import ADAPTERS_FILE, SkipConfig
from skipdecode.errors import ConfigError, first_line
from skipdecode.seal import seal
from train.recipe import LoraSection

ADAPTER_FOLDER = "adapter"  # in a finished run with merged weights
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapters(model: PreTrainedModel, section: LoraSection) -> Any:
    """The model inside a PeftModel whose adapters alone are trained; the model itself where no rank is given.

    Raises ConfigError for modules that the model hasn't, and where `target_modules` must be named.
    """
    if section.r is None:
        return model
    if not section.merge and not model.name_or_path:
        raise ConfigError(
            "lora.merge=false needs model.name_or_path: adapters apart are loaded onto a model that can be found again"
        )
    import peft  # here: it takes seconds

    config = peft.LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        # Adapters of a model without data have none either.
        return peft.get_peft_model(model, config, low_cpu_mem_usage=model.device.type == "meta")
    except ValueError as error:
        raise ConfigError(f"lora.target_modules is {section.target_modules}: {first_line(error)}") from error


def merge_adapters(base: PreTrainedModel, folder: Path) -> None:
    """Turn a folder of adapters into a checkpoint of merged weights, with the adapters in `adapter/` in it."""
    import peft

    apart = folder / ADAPTER_FOLDER
    apart.mkdir()
    for file in list(folder.iterdir()):
        if file.is_file():
            shutil.copy(file, apart / file.name)
    seal(apart)
    for name in (_CONFIG, _WEIGHTS, ADAPTERS_FILE, "README.md"):
        (folder / name).unlink(missing_ok=True)
    merged: Any = peft.PeftModel.from_pretrained(base, str(apart)).merge_and_unload()
    merged.save_pretrained(folder)
    remembered = SkipConfig.load(apart)
    if remembered is not None:
        remembered.save(folder)
