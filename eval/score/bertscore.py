"""BERTScore (Zhang et al., ICLR 2020) by the bert-score library."""

from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.score.metric import BertModel, Metric, NotAvailableError, Statistics, Texts, mean_of
from eval.score.tokenizers import MOST_LOST
from skipdecode.errors import ConfigError, first_line

_NO_LENGTH = 10**9  # a tokenizer that names no length says 10**30


def bert_model(name: str | None, layers: int | None) -> BertModel | None:
    """The model that command-line options name. Raises ConfigError for layers without a model."""
    if name is None and layers is not None:
        raise ConfigError(f"--bertscore-layers is {layers} without a model: name one with --bertscore-model")
    return BertModel(name, layers) if name is not None else None


def bertscore(predictions: Sequence[str], references: Sequence[Sequence[str]], model: BertModel) -> Statistics:
    """BERTScore F1 from 0 to 100: the mean over predictions of the best reference; not rescaled, without idf.

    Raises ConfigError for a model that can't be loaded.
    """
    scorer = load_scorer(model)
    # bert-score warns at each empty text and gives 0: here without the noise.
    written = [n for n, text in enumerate(predictions) if text.strip()]
    scores = [0.0] * len(predictions)
    if written:
        found = scorer.score([predictions[n] for n in written], [list(references[n]) for n in written])
        for n, score in zip(written, found[2].tolist(), strict=True):
            scores[n] = score
    return mean_of(scores, scale=100)


def describe(model: BertModel) -> str:
    """Say what BERTScore computes with a model, and at which layer."""
    version, layer = metadata.version("bert-score"), load_scorer(model).num_layers
    return f"bert-score {version}, F1 of the best reference, mean over items, {model.name}, layer {layer}"


@lru_cache(maxsize=1)
def load_scorer(model: BertModel) -> Any:
    """The library's scorer with its model. Raises ConfigError where one of the two isn't there or doesn't fit."""
    try:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers
    except ImportError as error:
        raise ConfigError("BERTScore wants the library bert-score: pip install -e '.[bertscore]'") from error
    from transformers import AutoConfig, AutoTokenizer

    try:
        depth = AutoConfig.from_pretrained(model.name, trust_remote_code=False).num_hidden_layers
        length = AutoTokenizer.from_pretrained(model.name, trust_remote_code=False).model_max_length
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"the BERTScore model {model.name!r} can't be loaded: {first_line(error)}") from error
    layers = model.layers if model.layers is not None else model2layers.get(Path(model.name).name)
    layers = layers if layers is not None else model2layers.get(model.name)
    if layers is None:
        raise ConfigError(
            f"the BERTScore model {model.name!r} isn't one that bert-score knows a layer for: name it "
            f"(--bertscore-layers, 1 to {depth})"
        )
    if not 1 <= layers <= depth:
        raise ConfigError(f"--bertscore-layers is {layers}: {model.name} has layers 1 to {depth}")
    if length > _NO_LENGTH:
        raise ConfigError(
            f"the tokenizer of {model.name!r} names no longest text: set model_max_length in its tokenizer_config.json"
        )
    return BERTScorer(model_type=model.name, num_layers=layers)


def _compute(texts: Texts) -> Statistics:
    if texts.bert is None:
        raise NotAvailableError("it has no default model: name one with --bertscore-model")
    return bertscore(texts.predictions, texts.references, texts.bert)


def _obstacle(texts: Texts) -> str | None:
    """Texts whose tokens the model doesn't know are alike for it, whatever they say."""
    if texts.bert is None:
        return None  # which `compute` refuses
    tokenizer = load_scorer(texts.bert)._tokenizer
    pieces = [piece for text in texts.right for piece in tokenizer.tokenize(text)]
    share = pieces.count(tokenizer.unk_token) / len(pieces) if pieces and tokenizer.unk_token is not None else 0.0
    if share <= MOST_LOST:
        return None
    return f"{share:.0%} of the references' tokens are unknown to {texts.bert.name}: name a model of their language"


def _describe(texts: Texts) -> str:
    assert texts.bert is not None  # else it wasn't computed
    return describe(texts.bert)


BERTSCORE = Metric(
    "bertscore", "BERTScore", "Zhang et al., ICLR 2020", _compute, _describe, _obstacle, in_short_table=True
)
