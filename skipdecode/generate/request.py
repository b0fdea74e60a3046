"""What one call of `model.generate` asks a decoding loop for."""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from skipdecode.errors import ConfigError
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.schedule import SkipSchedule

# A PreTrainedModel with GenerationMixin; transformers has no public type for that.
GenerativeModel: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class DecodeRequest:
    """The arguments of one call, checked and complete.

    Attributes:
        model: a transformers model, possibly wrapped.
        input_ids: token ids of the prompts, [batch, prompt length]; empty if only embeddings were passed.
        schedule: the layers that each step runs; if `lossless`, full depth runs and drafts have their own schedule.
        logits_processor, stopping_criteria, generation_config: as `generate` passes them to a `custom_generate`.
        synced_gpus, streamer: likewise.
        model_kwargs: further inputs of the model, such as `attention_mask` and `past_key_values`.
        weights: as in `skip_generate`; None for the usual ones.
        cuda_graphs: as in `skip_generate`.
    """

    model: GenerativeModel
    input_ids: torch.Tensor
    schedule: SkipSchedule
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]
    weights: Weights | None = None
    cuda_graphs: bool | None = None

    @property
    def prompt_length(self) -> int:
        """KV slots that the prompts fill, padding included."""
        return prompt_length(self.input_ids, self.model_kwargs)

    @property
    def max_steps(self) -> int:
        """Maximum number of decode steps; the last new token is never an input."""
        return max(0, int(self.generation_config.max_length - self.input_ids.shape[1] - 1))

    @property
    def prompt_mask(self) -> torch.Tensor:
        """The attention mask of the prompts, [batch, prompt length]; `generate` drops one that hides nothing.

        Raises ConfigError if mask and prompt lengths differ.
        """
        mask: torch.Tensor | None = self.model_kwargs.get("attention_mask")
        length = self.prompt_length
        if mask is None:
            return self.input_ids.new_ones(len(self.input_ids), length)
        if mask.shape[1] != length:
            raise ConfigError(f"attention_mask has {mask.shape[1]} positions and the prompt {length}: they must agree")
        return mask.long() if mask.dtype == torch.uint8 else mask  # sums and negations of uint8 wrap around

    def with_cache(self, cache: Cache) -> "DecodeRequest":
        """The same request with a cache of the library's own."""
        return replace(self, model_kwargs={**self.model_kwargs, "past_key_values": cache})


def prompt_length(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """KV slots that the prompts of a call fill, padding included."""
    embeds = model_kwargs.get("inputs_embeds")
    return int(input_ids.shape[1] if embeds is None else embeds.shape[1])


def prompt_tokens(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """The length of each prompt of a call, without padding."""
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return [max(1, int(tokens)) for tokens in mask.sum(dim=-1).tolist()]
    return [prompt_length(input_ids, model_kwargs)] * len(input_ids)
