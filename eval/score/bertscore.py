"""BERTScore (Zhang et al., ICLR 2020) by the bert-score library."""

from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.score.metric import BertModel, Metric, NotAvailableError, Statistics, Texts, mean_of
from eval.score.tokenizers import MAX_LOST
from skipdecode.errors import ConfigError, first_line

_NO_LENGTH = 10**9  # tokenizers without a maximum length report 10**30


def bert_model(name: str | None, layers: int | None) -> BertModel | None:
    """The BertModel of command-line options. Raises ConfigError for layers without a model."""
    if name is None and layers is not None:
        raise ConfigError(f"--bertscore-layers is {layers}, but --bertscore-model is missing")
    return BertModel(name, layers) if name is not None else None


def bertscore(predictions: Sequence[str], references: Sequence[Sequence[str]], model: BertModel) -> Statistics:
    """BERTScore F1 from 0 to 100 with the best reference, averaged over predictions; not rescaled, without idf.

    Raises ConfigError for a model that can't be loaded.
    """
    scorer = load_scorer(model)
    # Empty predictions score 0; bert-score would print a warning for each.
    nonempty = [n for n, text in enumerate(predictions) if text.strip()]
    scores = [0.0] * len(predictions)
    if nonempty:
        found = scorer.score([predictions[n] for n in nonempty], [list(references[n]) for n in nonempty])
        for n, score in zip(nonempty, found[2].tolist(), strict=True):
            scores[n] = score
    return mean_of(scores, scale=100)


def describe(model: BertModel) -> str:
    """One line on BERTScore with this model."""
    version, layer = metadata.version("bert-score"), load_scorer(model).num_layers
    return f"bert-score {version}, F1 of the best reference, mean over items, {model.name}, layer {layer}"


@lru_cache(maxsize=1)
def load_scorer(model: BertModel) -> Any:
    """Load the scorer of bert-score. Raises ConfigError where the library or the model is missing or unsuitable."""
    try:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers
    except ImportError as error:
        raise ConfigError("BERTScore needs the library bert-score: pip install -e '.[bertscore]'") from error
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
            f"bert-score has no default layer for the model {model.name!r}: give --bertscore-layers between 1 and "
            f"{depth}"
        )
    if not 1 <= layers <= depth:
        raise ConfigError(f"--bertscore-layers is {layers}: {model.name} has layers 1 to {depth}")
    if length > _NO_LENGTH:
        raise ConfigError(
            f"the tokenizer of {model.name!r} has no maximum length: set model_max_length in its tokenizer_config.json"
        )
    return BERTScorer(model_type=model.name, num_layers=layers)


def _compute(texts: Texts) -> Statistics:
    if texts.bert is None:
        raise NotAvailableError("it has no default model: give one with --bertscore-model")
    return bertscore(texts.predictions, texts.references, texts.bert)


def _obstacle(texts: Texts) -> str | None:
    """The model can't distinguish texts whose tokens are unknown to it."""
    if texts.bert is None:
        return None  # `compute` raises the error
    tokenizer = load_scorer(texts.bert)._tokenizer
    pieces = [piece for text in texts.expected for piece in tokenizer.tokenize(text)]
    share = pieces.count(tokenizer.unk_token) / len(pieces) if pieces and tokenizer.unk_token is not None else 0.0
    if share <= MAX_LOST:
        return None
    return f"{share:.0%} of the references' tokens are unknown to {texts.bert.name}: give a model of their language"


def _describe(texts: Texts) -> str:
    assert texts.bert is not None  # since it was computed
    return describe(texts.bert)


BERTSCORE = Metric(
    "bertscore", "BERTScore", "Zhang et al., ICLR 2020", _compute, _describe, _obstacle, in_short_table=True
)
