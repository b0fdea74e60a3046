"""Cases of decoding for law 5, drawn at random, and what each of them must give.

The reference knows no cache, no batch and no padding: each row alone, its prompt and its text in one whole pass of the
model's own layers. A layer is computed for every column, and what it gives is kept where the column runs the layer (by
law 3 these are a prefix, so with causal attention no column that runs a layer sees one that doesn't). As a column sees
those before it alone, the pass gives the logits that a loop with a pass for each token would choose from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import drawn_schedules
import torch
from fastpath_cases import WINDOWED, fresh
from hypothesis import strategies as st
from naive_opt import tokens_by_layers
from tiny_models import END, OPT_KINDS, PAD, TINY_FAMILIES, VOCABULARY, randomised, tiny_config
from torch import nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from weight_updates import UPDATES

from skipdecode import SkipSchedule, skip_generate
from skipdecode.kernels.cpu import kernels

LAYERS = 6
MOST_NEW_TOKENS = 12
# Rounding may choose otherwise between tokens whose scores (logarithms of probabilities) lie this close together.
NEAR_TIE = 1e-3
# 8-bit activations round by 1/127 of a row's largest: what differs by 1e-7 before may differ by so much after.
NEAR_TIE_INT8 = 0.5
# Kinds of weights that give texts of their own.
ROUNDED = ("int8", "int4", "int4-int8-head", "int8-int4-head") if kernels() is not None else ("int8",)

# Sliding and full layers in turns: a schedule may skip the first layer of either kind.
_TYPES = {"s": "sliding_attention", "f": "full_attention"}
_TURNS = {"slides first": "sfsfsf", "slides next": "fsfsfs", "slides on top": "fffsss", "slides below": "ffsffs"}
MIXED = {f"{family}, {turns}": (family, turns) for family in ("qwen2", "qwen3") for turns in _TURNS}
MODELS = [*sorted(TINY_FAMILIES), *OPT_KINDS, *MIXED]
WITHOUT_GRAPHS = {*WINDOWED, *MIXED}
CACHES = ["planned", "dynamic", "static", "DynamicCache", "DynamicCache of the config", "StaticCache"]


@dataclass(frozen=True)
class Sampling:
    """Settings of generate."""

    temperature: float
    top_k: int  # 0: all
    top_p: float


@dataclass(frozen=True)
class Case:
    """One generation, or two with a change of the weights in between.

    Attributes:
        lengths: of the prompts, padded on the left to the longest.
        ends: end tokens, at any of which a row's text ends.
        mask: whether generate is given an attention mask.
        embeds: whether the prompt is given as embeddings.
        update: a name in UPDATES; None for one generation.
        only: the number of the one parameter that the update changes, modulo how many there are; None for all.
        cuda_graphs: whether steps run on buffers that stay, where there can be such.
    """

    model: str
    schedule: SkipSchedule
    lengths: tuple[int, ...]
    seed: int
    new_tokens: int
    ends: tuple[int, ...]
    mask: bool
    embeds: bool
    cache: str
    weights: str | None
    sampling: Sampling | None
    update: str | None
    only: int | None
    cuda_graphs: bool = False


@st.composite
def schedules(draw: st.DrawFn) -> SkipSchedule:
    if draw(st.integers(0, 4)) == 4:
        return SkipSchedule.full_depth(LAYERS)
    return draw(drawn_schedules.schedules(LAYERS, MOST_NEW_TOKENS))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(
        st.lists(st.integers(1, 12), min_size=1, max_size=6)  # ragged
        | st.builds(lambda length, rows: [length] * rows, st.integers(1, 12), st.integers(1, 6))
    )
    padded = len(set(lengths)) > 1
    embeds = draw(st.booleans())
    held = draw(st.sampled_from(["planned", "planned", *CACHES]))
    model = draw(st.sampled_from(MODELS))
    sampling = st.builds(
        Sampling, st.sampled_from([0.7, 1.0, 1.5]), st.sampled_from([0, 2, 20]), st.sampled_from([0.5, 0.9, 1.0])
    )
    return Case(
        model=model,
        schedule=draw(schedules()),
        lengths=tuple(lengths),
        seed=draw(st.integers(0, 999)),
        new_tokens=draw(st.integers(1, MOST_NEW_TOKENS)),
        # Up to a third of all tokens: rows end at different steps, and leave their batch.
        ends=(END, *range(4, VOCABULARY, draw(st.sampled_from([3, 5, 8, 13, VOCABULARY])))),
        # generate finds padding among token ids by itself; among embeddings it can't.
        mask=True if padded and embeds else draw(st.booleans()),
        embeds=embeds,
        cache=held,
        weights=draw(st.sampled_from([None, "model", "packed", *ROUNDED] if held == "planned" else [None, "model"])),
        sampling=draw(st.none() | sampling),
        update=draw(st.none() | st.sampled_from(sorted(UPDATES))),
        only=draw(st.none() | st.integers(0, 199)),
        cuda_graphs=draw(st.booleans()) if held == "planned" and model not in WITHOUT_GRAPHS else False,
    )


@cache
def fresh_model(name: str) -> PreTrainedModel:
    """A model that nothing has decoded with, to be copied."""
    if name not in MIXED:
        return fresh(name)
    family, turns = MIXED[name]
    window = {"use_sliding_window": True, "sliding_window": 5, "layer_types": [_TYPES[kind] for kind in _TURNS[turns]]}
    return randomised(tiny_config(family, **TINY_FAMILIES[family], **window), seed=1)


@cache
def _used_model(name: str) -> PreTrainedModel:
    """The model that every case without an update decodes with, one after the other."""
    return deepcopy(fresh_model(name))


def run_case(case: Case) -> int:
    """Decode as the case says. Returns how many tokens were chosen otherwise in a near tie; raises AssertionError."""
    if case.update is None:
        return _decode_and_check(case, _used_model(case.model), fresh_model(case.model))
    model, reference = deepcopy(fresh_model(case.model)), deepcopy(fresh_model(case.model))
    prepare, update = UPDATES[case.update]
    for each in (model, reference):
        prepare(each)
    ties = _decode_and_check(replace(case, new_tokens=min(case.new_tokens, 3)), model, reference)
    for each in (model, reference):
        torch.manual_seed(case.seed)
        update(each, case.only)
        each.eval()
    return ties + _decode_and_check(case, model, reference)


def _decode_and_check(case: Case, model: PreTrainedModel, reference: PreTrainedModel) -> int:
    prompts = draw_prompts(case)
    decoded = decode(case, model, prompts)
    if case.weights in ROUNDED:
        return check_rounded(case, model, reference, prompts, decoded)
    ties = check(case, reference, prompts, decoded)
    full = case.schedule.min_layers == LAYERS and not case.schedule.stopped_layers
    if full:  # full depth is generate's own; that a gate was left would show here too
        ties += check(case, reference, prompts, decode(replace(case, weights=None), model, prompts, plain=True))
    return ties


def draw_prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(case.seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in case.lengths]


def decode(
    case: Case, model: PreTrainedModel, prompts: list[list[int]], *, plain: bool = False, **changes: Any
) -> list[list[int]]:
    """Each row's new tokens, up to and with the end token; `plain` is generate without a schedule."""
    output = generate(case, model, prompts, plain=plain, **changes)
    new = output[:, 0 if case.embeds else max(map(len, prompts)) :]
    texts = []
    for row in new.tolist():
        end = next((step for step, token in enumerate(row) if token in case.ends), len(row))
        text = row[: end + 1]
        assert set(row[len(text) :]) <= {PAD}, f"after its end a row goes on with {row[len(text) :]}"
        texts.append(text)
    assert new.shape[1] == max(map(len, texts)) <= case.new_tokens
    assert all(len(text) == case.new_tokens or text[-1] in case.ends for text in texts), f"a text stops early: {texts}"
    return texts


def generate(
    case: Case, model: PreTrainedModel, prompts: list[list[int]], *, plain: bool = False, **changes: Any
) -> Any:
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    request: dict[str, Any] = {"input_ids": ids}
    if case.embeds:
        with torch.no_grad():
            request = {"inputs_embeds": model.get_input_embeddings()(ids)}
    request["eos_token_id"] = list(case.ends)
    if case.mask:
        request["attention_mask"] = (ids != PAD).long()
    if case.cache in ("dynamic", "static"):
        request["cache_implementation"] = case.cache
    elif case.cache == "DynamicCache":
        request["past_key_values"] = DynamicCache()
    elif case.cache == "DynamicCache of the config":
        request["past_key_values"] = DynamicCache(config=model.config)
    elif case.cache == "StaticCache":
        request["past_key_values"] = StaticCache(config=model.config, max_cache_len=longest + case.new_tokens)
    if case.sampling is not None:
        request |= {"do_sample": True, **asdict(case.sampling)}
    else:
        request["do_sample"] = False
    if not plain:
        request |= {"custom_generate": skip_generate, "schedule": case.schedule, "weights": case.weights}
        request["cuda_graphs"] = case.cuda_graphs
    torch.manual_seed(case.seed)
    return model.generate(**request, max_new_tokens=case.new_tokens, **changes)


def check(case: Case, reference: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]) -> int:
    """Hold each token against the reference's scores. Returns how many differ from its choice in a near tie."""
    noise = None
    if case.sampling is not None:
        # One sample of torch.multinomial is the largest of probability / noise.
        torch.manual_seed(case.seed)
        noise = [torch.empty(len(prompts), VOCABULARY).exponential_() for _ in range(max(map(len, texts)))]
    ties = 0
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = whole_pass(reference, prompt + text[:-1], case.schedule, len(prompt))[len(prompt) - 1 :]
        for step, token in enumerate(text):
            waits = noise[step][row] if noise is not None else None
            # A cut of the sampling (top_k, top_p) is a tie of its own: it may fall to either side of a token.
            gaps = [_gap(logits[step], token, case.sampling, waits, slack) for slack in (0.0, 1e-4, -1e-4)]
            best = int(logits[step].argmax())
            assert min(gaps) <= NEAR_TIE, f"row {row}, step {step}: {token}, {gaps[0]} below the best (greedy: {best})"
            ties += gaps[0] > 0
    return ties


def _gap(logits: torch.Tensor, token: int, sampling: Sampling | None, noise: Any, slack: float) -> float:
    """How far the score of `token` lies below the best, of logits [vocabulary]."""
    scores = logits.log_softmax(-1)
    if sampling is not None:
        scores = (logits / sampling.temperature).log_softmax(-1)
        if sampling.top_k > 0:
            least = scores.topk(sampling.top_k).values[-1]
            scores = scores.masked_fill(scores < least - slack, -torch.inf)
        ordered, order = scores.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        scores[order[before >= sampling.top_p + slack]] = -torch.inf
        scores = scores - noise.log()
    return float(scores.max() - scores[token])


def check_rounded(
    case: Case, model: PreTrainedModel, reference: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]
) -> int:
    """8 and 4 bits give other texts than a model's own weights; but those of another copy, and of each row alone."""
    assert texts == decode(case, deepcopy(reference), prompts), "another copy of the same weights decodes otherwise"
    if case.sampling is not None:  # rows alone draw other numbers
        return 0
    ties = 0
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = generate(case, model, [prompt], return_dict_in_generate=True, output_logits=True)
        tokens = alone.sequences[0, 0 if case.embeds else len(prompt) :].tolist()
        other = next((step for step, (a, b) in enumerate(zip(text, tokens, strict=False)) if a != b), None)
        if other is not None:
            scores = alone.logits[other][0].log_softmax(-1)
            gap = float(scores.max() - scores[text[other]])
            assert gap <= NEAR_TIE_INT8, f"row {row}, step {other}: {text[other]}, {gap} below the row alone's best"
            ties += 1
    return ties


@torch.no_grad()
def whole_pass(model: PreTrainedModel, tokens: list[int], schedule: SkipSchedule, prompt_columns: int) -> torch.Tensor:
    """Logits [columns, vocabulary] of one row without padding, under a schedule."""
    with _keeping(model, tokens_by_layers(schedule, prompt_columns, len(tokens))):
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@contextmanager
def _keeping(model: PreTrainedModel, runs: torch.Tensor) -> Iterator[None]:
    """What a layer gives is kept in the columns that run it, as `runs` [columns, layers] says; the others pass by."""
    (layers,) = (each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == LAYERS)

    def keep(index: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            after, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
            kept = torch.where(runs[:, index][None, :, None], after, before)
            return kept if rest is None else (kept, *rest)

        return hook

    handles = [layer.register_forward_hook(keep(n), with_kwargs=True) for n, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
