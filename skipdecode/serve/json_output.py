"""Output that is JSON, by masking every token that could not continue a JSON text (`response_format`).

The grammars and their masks are those of llguidance, which follows JSON Schema and refuses what it can't enforce.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LogitsProcessor

from skipdecode.errors import ConfigError, first_line

# Without a maximum, a model may add whitespace for ever.
_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,8}"}


class JSONMask(LogitsProcessor):
    """Masks the tokens that can't follow in one sequence; its end tokens are possible once the text is complete.

    Args:
        matcher: llguidance's, at the beginning of the text.
        prompt_length: tokens of the prompt.
    """

    def __init__(self, matcher: Any, prompt_length: int) -> None:
        self._matcher, self._length = matcher, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The masked logits [1, vocabulary], given the prompt and the generated tokens [1, length]."""
        self._matcher.consume_tokens(input_ids[0, self._length :].tolist())
        self._length = input_ids.shape[1]
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.bool)
        if self._matcher.is_error():
            raise RuntimeError(f"the JSON grammar failed: {self._matcher.get_error()}")
        masked = torch.full_like(scores, -torch.inf)
        count = min(len(allowed), scores.shape[-1])  # a model may have more logits than its tokenizer has tokens
        allowed = allowed[:count].to(scores.device)
        masked[:, :count] = scores[:, :count].masked_fill(~allowed, -torch.inf)
        return masked


class JSONGrammars:
    """Compiles JSON schemas for one tokenizer.

    Args:
        tokenizer: a fast one.
        vocabulary: number of token ids of the model.
        end_tokens: token ids that end a sequence.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: list[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, end_tokens
        self._table: Any = None

    def matcher(self, schema: Mapping[str, Any]) -> Any:
        """A matcher of texts that have this schema, which copies itself by `deep_copy`.

        Raises:
            ConfigError: if llguidance isn't installed or can't enforce the schema, and for a tokenizer or model that it
                can't be used with.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError(
                "response_format needs llguidance, which this server lacks: pip install 'skipdecode[json]'"
            ) from error
        if not self._end_tokens:
            raise ConfigError("response_format needs a model with an end token, and this one has none")
        if self._table is None:
            try:
                count = max(self._vocabulary, len(self._tokenizer))
                self._table = from_tokenizer(self._tokenizer, n_vocab=count, eos_token=self._end_tokens)
            except ValueError as error:
                raise ConfigError(f"response_format can't be used with this tokenizer: {first_line(error)}") from error
        matcher = LLMatcher(self._table, LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS))
        if matcher.is_error():
            raise ConfigError(f"response_format has a schema that can't be enforced: {matcher.get_error().strip()}")
        return matcher
