"""A tokenizer trained on a task's text, for models that are trained from scratch."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.task import Example
from skipdecode.errors import ConfigError

# The ids are OPT's: <s> 0, <pad> 1, </s> 2, <unk> 3. As in OPT, </s> is also the start token.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
MIN_SIZE = 256 + len(SPECIAL_TOKENS)  # every byte is a token, so that any text can be encoded


def train_tokenizer(examples: Iterable[Example], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the prompts and targets of examples.

    Args:
        examples: the examples, read once.
        vocab_size: number of tokens.
        max_length: the tokenizer's `model_max_length`.

    Raises:
        ConfigError: for a vocabulary too small for every byte.
    """
    if vocab_size < MIN_SIZE:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}: it must be at least {MIN_SIZE} (bytes and special tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for example in examples for text in (example.prompt, *example.targets))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
