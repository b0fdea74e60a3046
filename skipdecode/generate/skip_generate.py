"""Decoding under a schedule, behind `model.generate(custom_generate=skip_generate)`."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, get_args

import torch
from torch import nn
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from skipdecode.errors import ConfigError, unknown
from skipdecode.families import decoder_layers, longest_sequence, unwrap
from skipdecode.fastpath.model import FastDecoder
from skipdecode.gating import all_positions, check_not_attached, check_schedule, gated_layers
from skipdecode.generate.decode_loop import GenerativeModel, decode_loop
from skipdecode.generate.draft_policy import MOST_DRAFTS, DraftLength, LoopKind, hoped
from skipdecode.generate.fast_path import FastPath, fast_path
from skipdecode.generate.lossless_loop import DraftCounts, LosslessLoop
from skipdecode.generate.runners import make_columns_runner, make_runner, prompt_columns
from skipdecode.generate.solved_schedules import SolvedSchedules
from skipdecode.generate.stopping import limited_config
from skipdecode.internals import argument_of_generate, receives_tokenizer
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.machine_profile import describe_cost_model
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.schedule.solver import check_speedup

_WARNED: set[Any] = set()  # targets that can't be reached, with their models: each is told once


@receives_tokenizer
def skip_generate(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    schedule: SkipSchedule | Mapping[str, Any] | None = None,
    speedup: float | None = None,
    over: Over | None = None,
    strict: bool = False,
    weights: Weights | None = None,
    cuda_graphs: bool | None = None,
    lossless: bool = False,
    order: Sequence[int] | None = None,
    draft_counts: DraftCounts | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode greedily or by sampling while step i runs `schedule.layers_at(i)` alone.

    Pass it to transformers, which prepares everything and calls it:
    `model.generate(**inputs, custom_generate=skip_generate, speedup=3, max_new_tokens=64)`, or with a schedule of
    one's own. Prompts are padded on the left. Sampling settings, stopping criteria, streamers and
    `return_dict_in_generate` are generate's own.

    The cache is planned (`PlannedCache`, law 6) unless generate is given one, by `past_key_values` or by
    `cache_implementation`. With a planned cache, steps take the fast path (`skipdecode.fastpath.model`) where the model
    is made of plain parts and the call asks for nothing else, and go through its own forward pass elsewhere.

    The schedule is for the passes of this loop. What a logits processor or a stopping criterion runs of the model by
    itself, such as the pass without a prompt of `guidance_scale`, runs every layer. Several threads may decode with one
    model, at speeds of their own.

    Args:
        schedule: which layers each generated token runs; or its fields as plain values.
        speedup: on the wall clock, in place of a schedule, for a model whose config says what it was trained for
            (`skipdecode.checkpoint.skip_config.SkipConfig`); the schedule is the one that training drew for it, or is
            solved with the same settings: for this batch, where the model knows how long its texts are, and for this
            machine's clock where `skipdecode calibrate` has measured it. Where it can't be reached, the fastest
            schedule that the model was trained for decodes, and a warning says so once.
        over: the time that the speedup is of: "decode", from the first new token on; "all", that of the prompts too,
            which then run fewer layers where they must. None for what the model was trained for, and for "decode" of
            lossless texts, whose prompts run every layer.
        strict: whether a speedup that can't be reached is refused in place of that.
        weights: what the prompt and decode steps are computed with. "packed" (on CPU, in float32
            and bfloat16): copies in the layout that the processor reads fastest. "int8" and "int4" (on CPU): copies
            in so many bits, and activations in 8; "int4-int8-head" and "int8-int4-head": those of layers in one and of
            the LM head in the other. 4 bits are by the compiled kernels alone (`skipdecode.kernels.cpu`). "model": no
            copies. By default "packed" where it is possible and the copies fit in half of the memory that is free, else
            "model". The first call makes the copies, the next ones find them.
        cuda_graphs: whether steps of the fast path are replayed as CUDA graphs (`skipdecode.fastpath.cuda_graphs`),
            which are kept for the next calls of the same shape; by default on CUDA, unless the model's attention has a
            sliding window.
        lossless: whether to decode full depth's own text: the schedule drafts tokens, and full depth verifies several
            in one pass; those that it wouldn't have chosen make way for its own. Sampled texts have full depth's
            distribution. Prompts run every layer. With neither a schedule nor a speedup, so many layers draft as
            are expected to give the most, by what drafts cost and how often those of earlier calls were taken.
        order: with `lossless` and neither a schedule nor a speedup: the order of layers of which the first ones draft,
            such as `skipdecode order` finds; with it a model that wasn't trained to skip can draft, too (as in SWIFT,
            arXiv 2410.06916).
        draft_counts: what a lossless call adds its passes and drafts to
            (`skipdecode.generate.lossless_loop.DraftCounts`).
        tokenizer: for generate's `stop_strings` and `token_healing`.

    Returns:
        Token ids [batch, prompt columns + new tokens], or a GenerateDecoderOnlyOutput where it is asked for.

    Raises:
        ConfigError: without a schedule or a speedup (unless drafts are chosen) or with both; for a schedule of another
            depth, or a speedup of a model that wasn't trained to skip, or if `strict` one that can't be reached; for
            beam search and the other ways of decoding that aren't greedy or sampling, `use_cache=False`, a cache that
            already holds tokens or is offloaded, attention or hidden state outputs, prompt tuning, more tokens than the
            model has positions; for copied weights, CUDA graphs or `lossless` where there is no fast path; for CUDA
            graphs with a sliding window or with `lossless`.
    """
    prompts = None if schedule is not None else prompt_tokens(input_ids, model_kwargs)
    do_sample = bool(generation_config.do_sample)
    chosen = lossless is True and prompts is not None and speedup is None
    if order is not None and not chosen:
        raise ConfigError(
            "order is given without lossless=True, or beside a schedule or a speedup, which say what drafts: leave it "
            "out"
        )
    fast = fast_path(model)
    solved = fast.solved() if chosen else None
    drafts = solved.draft_candidates(order) if solved is not None else []
    schedule = drafts[0] if drafts else schedule
    no_fast_path = fast.why_not()  # every call asks: it is answered once
    usual = weights or fast.usual_weights(available=no_fast_path is None)
    how: dict[str, Any] = {"over": over, "weights": usual, "prompts": prompts, "lossless": bool(lossless)}
    how["strict"] = strict
    schedule = resolve_plan(model, schedule, speedup, **how).schedule
    if cuda_graphs not in (None, True, False):
        raise ConfigError(f"cuda_graphs is {cuda_graphs!r}: it must be True, False or None")
    if lossless not in (True, False):
        raise ConfigError(f"lossless is {lossless!r}: it must be True or False")
    if draft_counts is not None and not lossless:
        raise ConfigError("draft_counts is given without lossless=True: there are no drafts to count")
    generation_config = limited_config(generation_config, stopping_criteria)
    check_request(model, input_ids, generation_config, model_kwargs)
    check_not_attached(decoder_layers(model))
    arguments: dict[str, Any] = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": streamer or argument_of_generate("streamer"),
    }
    columns = prompt_columns(input_ids, model_kwargs)
    if lossless:
        columns_runner = make_columns_runner(
            model,
            input_ids,
            logits_processor,
            generation_config,
            synced_gpus,
            weights,
            cuda_graphs,
            model_kwargs,
            no_fast_path,
        )
        candidates, decoder = drafts or [schedule], columns_runner.decoder

        def choose(kind: LoopKind) -> tuple[SkipSchedule, DraftLength]:
            known, rows = solved or fast.solved(), len(input_ids)
            best, length = _best_draft(fast, known, decoder, candidates, rows, columns, kind, do_sample=do_sample)
            columns_runner.draft_with(fast.draft_decoder(decoder, best.layers_at(0)))
            return best, length

        return LosslessLoop(columns_runner, choose, input_ids, draft_counts=draft_counts, **arguments).run()
    plan = all_positions(schedule.num_layers, schedule.prompt_layers)
    gates = gated_layers(model, schedule, plan, prompt_columns=columns)
    with ExitStack() as entered:
        runner = make_runner(
            model,
            lambda: entered.enter_context(gates),
            schedule,
            input_ids,
            generation_config,
            synced_gpus,
            weights,
            cuda_graphs,
            model_kwargs,
            no_fast_path,
        )
        output = decode_loop(model, runner, input_ids, synced_gpus=synced_gpus, **arguments)
        runner.end()
        return output


def resolve_plan(
    model: GenerativeModel,
    schedule: SkipSchedule | Mapping[str, Any] | None,
    speedup: float | None,
    *,
    over: Over | None = None,
    weights: Weights | None = None,
    prompts: Sequence[int] | None = None,
    lossless: bool = False,
    strict: bool = False,
) -> SpeedPlan:
    """The schedule that `skip_generate` decodes a batch with, or drafts with if `lossless`, and its predicted speedup.

    `prompts` are the lengths of the batch's prompts in tokens (None: the conditions of training); the other arguments,
    and the errors, are those of `skip_generate`.
    """
    if strict not in (True, False):
        raise ConfigError(f"strict is {strict!r}: it must be True or False")
    if schedule is not None and speedup is not None:
        raise ConfigError("both schedule and speedup are given: a schedule says how fast it is; leave one out")
    if over is not None and speedup is None:
        raise ConfigError(f"over is {over!r} without a speedup: it says what the speedup is of")
    if isinstance(schedule, Mapping):
        schedule = SkipSchedule.from_dict(schedule)
    if schedule is not None:
        check_schedule(schedule, decoder_layers(model))
        return SpeedPlan(schedule)
    if speedup is None:
        raise ConfigError(
            "schedule is missing: model.generate(..., custom_generate=skip_generate, schedule=...), "
            "or speedup=... for a checkpoint that was trained to skip"
        )
    check_speedup(speedup)
    if over is not None and over not in get_args(Over):
        raise unknown("over", str(over), get_args(Over))
    if lossless:
        over = over or "decode"  # prompts run every layer: a target of them too is one that drafts can't meet
    fast = fast_path(model)
    solved = fast.solved()
    if solved.config is None:
        if speedup == 1:
            return SpeedPlan(
                SkipSchedule.full_depth(solved.sizes.num_layers), 1.0, 1.0, predicted_by=describe_cost_model(None)
            )
        raise ConfigError(
            f"speedup is {speedup!r}, but this model's config doesn't say what schedules it was trained for: "
            "pass schedule=solve_schedule(model, speedup)"
        )
    found = solved.plan(float(speedup), over, prompts, fast.profile(weights))
    # Its config may be of another depth than what is left of the model.
    check_schedule(found.schedule, decoder_layers(model))
    if not found.reached:
        if strict:
            raise found.refusal()
        _warn_once(model, over, found)
    return found


def prompt_tokens(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Tokens of each prompt of a batch, without its padding."""
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return [max(1, int(tokens)) for tokens in mask.sum(dim=-1).tolist()]
    return [prompt_columns(input_ids, model_kwargs)] * len(input_ids)


def choose_draft(
    model: GenerativeModel,
    prompts: Sequence[int],
    *,
    weights: Weights | None = None,
    do_sample: bool = False,
    order: Sequence[int] | None = None,
) -> SkipSchedule:
    """The schedule that drafts for a lossless batch: of `SolvedSchedules.draft_candidates` the one that is expected to
    give most.

    Raises ConfigError as these do.
    """
    fast = fast_path(model)
    solved = fast.solved()
    candidates = solved.draft_candidates(order)
    if fast.why_not() is not None:
        return candidates[0]  # refused later, with the reason
    decoder = fast.decoder(weights, looked=True)
    return _best_draft(fast, solved, decoder, candidates, len(prompts), max(prompts), do_sample=do_sample)[0]


def _best_draft(
    fast: FastPath,
    solved: SolvedSchedules,
    decoder: FastDecoder,
    schedules: Sequence[SkipSchedule],
    rows: int,
    prompt_length: int,
    kind: LoopKind = "ahead",
    *,
    do_sample: bool,
) -> tuple[SkipSchedule, DraftLength]:
    """Of schedules of more and more layers the one that is expected to draft best, and the choice of how much."""
    kinds = (decoder.weights, decoder.draft_weights)
    full, drafts = solved.lossless_costs(fast.model, *kinds, prompt_length)
    lengths = [
        DraftLength(
            fast.draft_record(decoder.weights, schedule, kind, do_sample=do_sample), full, schedule.num_layers, drafts
        )
        for schedule in schedules
    ]
    if len(schedules) == 1:
        return schedules[0], lengths[0]
    rates = [
        length.rate(rows, [schedule.min_layers] * MOST_DRAFTS, 1 - refused)
        for schedule, length, refused in zip(
            schedules, lengths, hoped([length.refused for length in lengths]), strict=True
        )
    ]
    best = rates.index(max(rates))
    return schedules[best], lengths[best]


def _warn_once(model: GenerativeModel, over: Over | None, plan: SpeedPlan) -> None:
    """Say that a target can't be reached, once for each model and target: the next batch has the same in its way."""
    key = (unwrap(model).config.name_or_path, plan.target, over)
    if key not in _WARNED:
        _WARNED.add(key)
        logging.get_logger("transformers.skipdecode").warning(plan.warning())


def check_request(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise ConfigError for what `generate` was asked for and a schedule can't decode, as `skip_generate` says."""
    check_mode(generation_config)
    prepare = vars(unwrap(model)).get("prepare_inputs_for_generation")
    if isinstance(wrapper := getattr(prepare, "__self__", None), nn.Module):
        unwrap(wrapper)  # peft calls its base model's generate with this one set; prompt tuning is refused
    if not model_kwargs.get("use_cache", True):
        raise ConfigError("use_cache is False: skip_generate needs the cache")
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ConfigError("past_key_values already holds tokens: skip_generate starts from a prompt and an empty cache")
    if getattr(cache, "offloading", False):
        raise ConfigError("the cache is offloaded: it fetches the next layer's keys and values, whether or not it runs")
    if generation_config.output_attentions or generation_config.output_hidden_states:
        raise ConfigError("output_attentions and output_hidden_states are not given: layers differ from step to step")
    _check_positions(model, input_ids, generation_config.max_length, model_kwargs)


def check_mode(generation_config: GenerationConfig) -> None:
    """Raise ConfigError where texts are to be searched for: a schedule decodes greedily or samples."""
    if (generation_config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams is {generation_config.num_beams}: skip_generate decodes greedily or samples")
    mode = generation_config.get_generation_mode(argument_of_generate("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asked = mode.value.replace("_", " ")
        raise ConfigError(f"{asked} is asked for: skip_generate decodes greedily or samples")


def check_unhealed(token_healing: object) -> None:
    """Raise ConfigError where prompts are to be healed by who counts the tokens behind them: `generate` strips them of
    white space first, so that it decodes behind another prompt, of another length.
    """
    if token_healing:
        raise ConfigError(
            f"token_healing is {token_healing!r}, be it in generation_config.json: prompts are decoded as they are; "
            "leave it out"
        )


def _check_positions(
    model: GenerativeModel, input_ids: torch.Tensor, max_length: int | None, model_kwargs: dict[str, Any]
) -> None:
    positions = longest_sequence(model.config)
    if positions is None:
        return
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if position_ids is not None:
        prompt = int(position_ids.max()) + 1
    else:
        prompt = int(mask.sum(dim=-1).max()) if mask is not None else prompt_columns(input_ids, model_kwargs)
    # The last new token is never an input, so it needs no position.
    needed = prompt + (max_length - input_ids.shape[1] - 1 if max_length is not None else 0)
    if needed > positions:
        raise ConfigError(
            f"the longest prompt has {prompt} tokens, {needed} positions are needed and the model has {positions}: "
            "shorten the prompt or lower max_new_tokens"
        )
