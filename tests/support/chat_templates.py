"""The chat templates of ChatML, Llama 3, Gemma and Mistral as these models publish them, with tiny tokenizers."""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    f"{{{{ raise_exception('{_ALTERNATE}') }}}}"
    "{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    f"{{{{ raise_exception('{_ALTERNATE}') }}}}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Chats:
    """A kind of chat model.

    Attributes:
        template: its chat template.
        special: its special tokens; the first one starts a text.
        eos: the tokenizer's end token.
        ends: the tokens that end generation, as in the model's generation_config.json.
        system: whether the template accepts a system message.
        bytes: whether its tokenizer is byte-level BPE; otherwise it writes spaces as "▁" and falls back to bytes.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    system: bool
    bytes: bool


KINDS = {
    "chatml": Chats(
        CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|im_end|>", ("<|im_end|>",), True, bytes=True
    ),
    "llama-3": Chats(
        LLAMA_3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eot_id|>"),
        True,
        bytes=True,
    ),
    "gemma": Chats(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        False,
        bytes=False,
    ),
    "mistral": Chats(MISTRAL, ("<s>", "</s>"), "</s>", ("</s>",), False, bytes=False),
}
# Merges of these span line breaks, so that an answer's first token can depend on the end of the prompt.
_TEXTS = ["user\n\n\nassistant\n\n the answer is\n\n\n 12\n\n", "a\n\n\n\nb  c", "[INST] the answer [/INST] is 12, 13"]


def chat_tokenizer(kind: str) -> Any:
    """The tokenizer, which starts texts with a special token unless none shall be added, except for ChatML."""
    chats = KINDS[kind]
    tokenizer = _byte_level() if chats.bytes else _byte_fallback(prepend=kind == "mistral")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in chats.special])
    first = chats.special[0]
    if kind != "chatml":
        pairs = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=pairs)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token=chats.eos,
        pad_token=chats.eos,
        padding_side="left",
        chat_template=chats.template,
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(20 * _TEXTS, trainer)
    return tokenizer


def _byte_fallback(*, prepend: bool) -> Tokenizer:
    words = ["<unk>", "▁", "a", "n", "\n", *(f"<0x{byte:02X}>" for byte in range(256)), "an", "▁a", "\n\n"]
    merges = [("a", "n"), ("▁", "a"), ("\n", "\n")]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prepend else [])])
    return tokenizer
