"""LoRA adapters around a model, and back into it."""

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from skipdecode.checkpoint.checksums import write_checksums
from skipdecode.checkpoint.skip_config import ADAPTERS_FILE, SkipConfig
from skipdecode.errors import ConfigError, first_line, unknown
from skipdecode.families import text_config
from train.recipe import LoraSection

ADAPTER_FOLDER = "adapter"  # in a finished run with merged weights
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapters(model: PreTrainedModel, section: LoraSection) -> Any:
    """The model inside a PeftModel whose adapters alone are trained; the model itself where no rank is given.

    Raises ConfigError for modules that the model hasn't, where `target_modules` must be named, and where what is merged
    would not be what was trained.
    """
    if section.r is None:
        return model
    if not section.merge and not model.name_or_path:
        raise ConfigError(
            "lora.merge=false needs model.name_or_path: adapters apart are loaded onto a model that can be found again"
        )
    parts = dict(model.named_modules())
    for target in section.target_modules or []:
        if not any(f".{name}".endswith(f".{target}") for name in parts):  # peft passes over one of several in silence
            innermost = {name.rpartition(".")[2] for name, part in parts.items() if not any(part.children())}
            raise ConfigError(f"lora.target_modules is {section.target_modules}: {unknown('layer', target, innermost)}")
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
        adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=model.device.type == "meta")
    except ValueError as error:
        raise ConfigError(f"lora.target_modules is {section.target_modules}: {first_line(error)}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = getattr(text_config(model.config), "tie_word_embeddings", False)
    if section.merge and tied and any(hasattr(end, "lora_A") for end in ends):
        raise ConfigError(
            f"lora.target_modules is {section.target_modules}: the model's embedding and its head share their weights, "
            "so that adapters of one, merged, would change both; leave them out, or set lora.merge=false"
        )
    return adapted


def merge_adapters(base: PreTrainedModel, folder: Path) -> None:
    """Turn a folder of adapters into a checkpoint of merged weights.

    The adapters stay in `adapter/` in it, unless the model that they adapt has no name by which it is found again.
    """
    import peft

    apart = folder / ADAPTER_FOLDER
    apart.mkdir()
    for file in list(folder.iterdir()):
        if file.is_file():
            shutil.copy(file, apart / file.name)
    write_checksums(apart)
    for name in (_CONFIG, _WEIGHTS, ADAPTERS_FILE, "README.md"):
        (folder / name).unlink(missing_ok=True)
    found_again = bool(base.name_or_path)
    merged: Any = peft.PeftModel.from_pretrained(base, str(apart)).merge_and_unload()
    merged.save_pretrained(folder)
    remembered = SkipConfig.load(apart)
    if remembered is not None:
        remembered.save(folder)
    if not found_again:
        shutil.rmtree(apart)
