"""Fields of OpenAI's and vLLM's requests that this server doesn't implement.

Many clients send them with a value that has no effect, such as a default. Such a value is accepted; any other value is
refused.
"""

from typing import Any

# The values without effect of each field. A field with none is refused unless it is null.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's sampling parameters
    "allowed_token_ids": (),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # there are no special tokens in the output
    "stop_token_ids": ([],),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # of a prompt that truncate_prompt_tokens shortens
    "use_beam_search": (False,),
    "watermarking": (False,),
    # vLLM's other parameters
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "prompt_embeds": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream_interval": (1,),
    "structural_tag": (),
    "structured_outputs": (),
    "vllm_xargs": ({},),
}

# Fields that can't change a response, which are accepted with any value of their type: they identify the user, or
# control a prompt cache, which this server doesn't have.
UNUSED: dict[str, type] = {
    "cache_salt": str,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "session_id": str,
    "user": str,
}


def is_neutral(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is one of those without effect; false isn't equal to 0.

    >>> is_neutral(0.0, (0,)), is_neutral(False, (0,)), is_neutral([], ([],))
    (True, False, True)
    """
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)
