"""Adding LoRA adapters to a model, and merging them into it."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from skipdecode.checkpoint.checksums import write_checksums
from skipdecode.checkpoint.four_bit import dequantise
from skipdecode.checkpoint.skip_config import ADAPTERS_FILE, SkipConfig
from skipdecode.errors import ConfigError, first_line, unknown
from skipdecode.families import text_config
from train.recipe import LoraSection

ADAPTER_FOLDER = "adapter"  # in a finished run with merged weights
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapters(model: PreTrainedModel, section: LoraSection) -> Any:
    """Wrap a model in a PeftModel that trains adapters alone; without a rank, return the model itself.

    Raises ConfigError for modules that the model doesn't have, where `target_modules` must be given, and where the
    merged weights would differ from what was trained.
    """
    if section.r is None:
        return model
    if not section.merge and not model.name_or_path:
        raise ConfigError(
            "lora.merge=false needs model.name_or_path: unmerged adapters are loaded onto a model that has a name"
        )
    parts = dict(model.named_modules())
    for target in section.target_modules or []:
        if not any(f".{name}".endswith(f".{target}") for name in parts):  # peft ignores one unknown name among several
            innermost = {name.rpartition(".")[2] for name, part in parts.items() if not any(part.children())}
            raise ConfigError(f"lora.target_modules is {section.target_modules}: {unknown('layer', target, innermost)}")
    import peft  # imported here, because it takes seconds

    config = peft.LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=section.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        # Adapters of a model on the meta device must be there too.
        adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=model.device.type == "meta")
    except ValueError as error:
        raise ConfigError(f"lora.target_modules is {section.target_modules}: {first_line(error)}") from error
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = getattr(text_config(model.config), "tie_word_embeddings", False)
    if section.merge and tied and any(hasattr(end, "lora_A") for end in ends):
        raise ConfigError(
            f"lora.target_modules is {section.target_modules}: the model's embedding and LM head share their weights, "
            "so that merging an adapter of one would change both; remove it, or set lora.merge=false"
        )
    return adapted


def merge_adapters(base: PreTrainedModel, folder: Path) -> None:
    """Turn a folder of adapters into a checkpoint of merged weights.

    The adapters are kept in its subfolder `adapter/`, unless their base model has no name by which it can be loaded. A
    base in 4 bits is dequantised to the data type that it was computed in.
    """
    import peft

    adapters = folder / ADAPTER_FOLDER
    adapters.mkdir()
    for file in list(folder.iterdir()):
        if file.is_file():
            shutil.copy(file, adapters / file.name)
    write_checksums(adapters)
    for name in (_CONFIG, _WEIGHTS, ADAPTERS_FILE, "README.md"):
        (folder / name).unlink(missing_ok=True)
    has_name = bool(base.name_or_path)
    if getattr(base, "is_loaded_in_4bit", False):
        dequantise(base)  # the adapters were trained on these values, and not on those before the quantisation
    merged: Any = peft.PeftModel.from_pretrained(base, str(adapters)).merge_and_unload()
    merged.save_pretrained(folder)
    skip_config = SkipConfig.load(adapters)
    if skip_config is not None:
        replace(skip_config, base_weights=None).save(folder)
    if not has_name:
        shutil.rmtree(adapters)
