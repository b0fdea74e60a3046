"""A random BERT with a tokenizer, small enough for any test."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'"


def save_tiny_bert(folder: Path, **tokenizer: object) -> Path:
    """A BERT of 3 layers that reads texts letter by letter, in a folder."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(pieces), max_position_embeddings=128, **shape)).save_pretrained(folder)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    BertTokenizerFast(vocab=vocabulary, **{"model_max_length": 128, **tokenizer}).save_pretrained(folder)
    return folder
