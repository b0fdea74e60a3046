"""A tokenizer trained on a task's own text, for models that start from random weights."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.task import Example
from skipdecode.errors import ConfigError

# At OPT's own ids: <s> 0, <pad> 1, </s> 2, <unk> 3. The end of text serves as its start too.
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
SMALLEST = 256 + len(SPECIAL_TOKENS)  # every byte is a token, so that any text can be written


def train_tokenizer(examples: Iterable[Example], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` tokens, learnt from prompts and targets, which are read once.

    Raises ConfigError for a vocabulary that can't hold every byte.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}: it must be at least {SMALLEST} (bytes and special tokens)"
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
