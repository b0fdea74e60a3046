"""Decoding under a schedule, called by `model.generate(custom_generate=skip_generate)`."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, get_args

import torch
from torch import nn
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from skipdecode.errors import ConfigError, unknown
from skipdecode.families import decoder_layers, longest_sequence, unwrap
from skipdecode.fastpath.model import FastDecoder
from skipdecode.gating import all_positions, check_not_attached, check_schedule, gated_layers
from skipdecode.generate.decode_loop import decode_loop
from skipdecode.generate.draft_policy import MAX_DRAFTS, CostDraftPolicy
from skipdecode.generate.draft_record import LoopKind, optimistic_rejection_rates
from skipdecode.generate.fast_path import FastPath, fast_path
from skipdecode.generate.lossless_loop import DraftCounts, LosslessLoop
from skipdecode.generate.request import DecodeRequest, GenerativeModel, prompt_length, prompt_tokens
from skipdecode.generate.runners import make_lossless_runner, make_runner
from skipdecode.generate.stopping import limited_config
from skipdecode.internals import argument_of_generate, receives_tokenizer
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.machine_profile import describe_cost_model
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import Over, SkipSchedule
from skipdecode.schedule.solver import check_speedup

_WARNED: set[Any] = set()  # models and targets that can't be reached: each is warned of once


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
    """Decode greedily or by sampling; step i runs only the layers `schedule.layers_at(i)`.

    Pass it to transformers, which prepares everything and calls it:
    `model.generate(**inputs, custom_generate=skip_generate, speedup=3, max_new_tokens=64)`, or with `schedule=...` in
    place of the speedup. Prompts are padded on the left. Sampling settings, stopping criteria, streamers and
    `return_dict_in_generate` work as in `generate`.

    The cache is a `PlannedCache`, which reserves for each layer only the KV slots that the schedule needs, unless
    `generate` gets another one by `past_key_values` or `cache_implementation`. With a PlannedCache, steps run on the
    fast path (`skipdecode.fastpath.model`) if it supports the model and the call; otherwise the model's own forward
    pass runs.

    The schedule applies to the passes of this loop. If a logits processor or stopping criterion runs the model itself,
    as `guidance_scale` does, that pass runs every layer. Several threads may decode with one model at different speeds.

    Args:
        schedule: the layers that each generated token runs; or its fields as a mapping.
        speedup: target speedup in wall-clock time, in place of a schedule, for a model whose config holds the schedules
            that it was trained for (`skipdecode.checkpoint.skip_config.SkipConfig`). The schedule is the one used in
            training for this speedup, or is solved with the same settings: for this batch if the config holds the
            lengths of completions, and for this machine if it was calibrated (`skipdecode calibrate`). If the target
            can't be reached, the fastest schedule that the model was trained for decodes, with a warning once.
        over: the time that the speedup refers to: "decode", from the first new token on; "all", end-to-end (prefill +
            decode), for which prompts run fewer layers if they must. None for what the model was trained for, and with
            `lossless` for "decode", because prompts then run every layer.
        strict: whether a speedup that can't be reached is an error.
        weights: the form of the weights that the prefill and the decode steps use. "packed" (on CPU, in float32 and
            bfloat16): copies in the layout that the processor reads fastest. "int8" and "int4": copies in 8 or 4 bits,
            and on CPU activations in 8; "int4-int8-head" and "int8-int4-head": layers in one and the LM head in the
            other. On CPU 4 bits need the compiled kernels (`skipdecode.kernels.cpu`), on a GPU both need the Triton
            kernels (`skipdecode.kernels.gpu`) and bfloat16 or float16. "model": no copies. By default "packed" if it is
            supported and the copies fit in half of the free memory, else "model". The first call makes the copies,
            later ones reuse them.
        cuda_graphs: whether steps on the fast path are replayed as CUDA graphs (`skipdecode.fastpath.cuda_graphs`),
            which later calls of the same shape reuse; by default on CUDA, unless the attention has a sliding window.
            True also replays short prompts (`skipdecode.fastpath.prompt_graphs`), which hasn't run on a GPU yet.
        lossless: self-speculative decoding, whose output is identical to full depth's: the schedule drafts tokens, and
            full depth verifies several in one pass and replaces those that it wouldn't have chosen. With sampling, the
            output has full depth's distribution. Prompts run every layer. With neither a schedule nor a speedup, the
            draft depth is chosen that is expected to be fastest, by the cost of drafts and their acceptance rate in
            earlier calls.
        order: an order of layers, such as `skipdecode order` finds, of which the first ones draft; with `lossless` and
            neither a schedule nor a speedup. It lets models draft that weren't trained to skip (as in SWIFT,
            arXiv 2410.06916).
        draft_counts: a lossless call adds its passes and drafts to these counts
            (`skipdecode.generate.lossless_loop.DraftCounts`).
        tokenizer: for generate's `stop_strings` and `token_healing`.

    Returns:
        Token ids [batch, prompt length + new tokens], or a GenerateDecoderOnlyOutput if it was requested.

    Raises:
        ConfigError: without a schedule or a speedup (unless drafts are chosen), or with both; for a schedule of another
            depth, a speedup for a model that wasn't trained to skip, or if `strict` a speedup that can't be reached;
            for beam search and other modes than greedy decoding and sampling, `use_cache=False`, a cache that already
            holds tokens or is offloaded, attention or hidden state outputs, prompt tuning, and more tokens than the
            model has positions; for weights that are copies, CUDA graphs and `lossless`, if the fast path doesn't
            support the model or the call; for CUDA graphs with a sliding window or with `lossless`.
    """
    do_sample = bool(generation_config.do_sample)
    prompts = None if schedule is not None else prompt_tokens(input_ids, model_kwargs)
    chooses_draft = lossless is True and schedule is None and speedup is None
    if order is not None and not chooses_draft:
        raise ConfigError(
            "order is given without lossless=True, or beside a schedule or a speedup, which determine the draft layers:"
            " leave it out"
        )
    fast = fast_path(model)
    drafts = fast.solved().draft_candidates(order) if chooses_draft else []
    obstacle = fast.why_not()
    plan = resolve_plan(
        model,
        drafts[0] if drafts else schedule,
        speedup,
        over=over,
        weights=weights or fast.usual_weights(available=obstacle is None),
        prompts=prompts,
        lossless=bool(lossless),
        strict=strict,
    )
    if cuda_graphs not in (None, True, False):
        raise ConfigError(f"cuda_graphs is {cuda_graphs!r}: it must be True, False or None")
    if lossless not in (True, False):
        raise ConfigError(f"lossless is {lossless!r}: it must be True or False")
    if draft_counts is not None and not lossless:
        raise ConfigError("draft_counts is given without lossless=True: there are no drafts to count")
    request = DecodeRequest(
        model,
        input_ids,
        plan.schedule,
        logits_processor,
        stopping_criteria,
        limited_config(generation_config, stopping_criteria),
        synced_gpus,
        streamer or argument_of_generate("streamer"),
        model_kwargs,
        weights,
        cuda_graphs,
    )
    check_request(model, input_ids, request.generation_config, model_kwargs)
    check_not_attached(decoder_layers(model))
    if lossless:
        return _decode_lossless(request, drafts or [plan.schedule], obstacle, draft_counts, do_sample=do_sample)
    return _decode(request, obstacle)


def _decode(request: DecodeRequest, obstacle: str | None) -> torch.Tensor | GenerateDecoderOnlyOutput:
    schedule = request.schedule
    plan = all_positions(schedule.num_layers, schedule.prompt_layers)
    gates = gated_layers(request.model, schedule, plan, prompt_columns=request.prompt_length)
    with ExitStack() as entered:
        runner = make_runner(request, obstacle, lambda: entered.enter_context(gates))
        output = decode_loop(runner, request)
        runner.end()
        return output


def _decode_lossless(
    request: DecodeRequest,
    candidates: Sequence[SkipSchedule],
    obstacle: str | None,
    draft_counts: DraftCounts | None,
    *,
    do_sample: bool,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    fast = fast_path(request.model)
    runner = make_lossless_runner(request, obstacle)

    def choose(kind: LoopKind) -> tuple[SkipSchedule, CostDraftPolicy]:
        batch = (len(request.input_ids), request.prompt_length)
        best, policy = _best_draft(fast, runner.decoder, candidates, *batch, kind, do_sample=do_sample)
        runner.draft_with(fast.draft_decoder(runner.decoder, best.layers_at(0)))
        return best, policy

    return LosslessLoop(request, runner, choose, draft_counts).run()


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
    """The schedule that `skip_generate` decodes a batch with, its expected speedup, and whether that is the target.

    Args:
        model: a transformers model, possibly wrapped.
        schedule: as in `skip_generate`.
        speedup: as in `skip_generate`.
        over: as in `skip_generate`.
        weights: as in `skip_generate`.
        prompts: tokens of each prompt of the batch.
        lossless: whether the schedule drafts.
        strict: as in `skip_generate`.

    Raises:
        ConfigError: as `skip_generate` does.
    """
    if strict not in (True, False):
        raise ConfigError(f"strict is {strict!r}: it must be True or False")
    if schedule is not None and speedup is not None:
        raise ConfigError("both schedule and speedup are given: a schedule determines its speedup; leave one out")
    if over is not None and speedup is None:
        raise ConfigError(f"over is {over!r} without a speedup: it names the time that the speedup refers to")
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
        over = over or "decode"  # prompts run every layer, so that drafts can't reach an end-to-end target
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
    # The config may be for another depth than the model has.
    check_schedule(found.schedule, decoder_layers(model))
    if not found.reached:
        if strict:
            raise found.refusal()
        _warn_once(model, over, found)
    return found


def choose_draft(
    model: GenerativeModel,
    prompts: Sequence[int],
    *,
    weights: Weights | None = None,
    do_sample: bool = False,
    order: Sequence[int] | None = None,
) -> SkipSchedule:
    """The schedule that drafts for a lossless batch with prompts of these lengths: the one of
    `SolvedSchedules.draft_candidates` that is expected to be fastest. Raises ConfigError as that does.
    """
    fast = fast_path(model)
    candidates = fast.solved().draft_candidates(order)
    if fast.why_not() is not None:
        return candidates[0]  # the call is refused later, with the reason
    decoder = fast.decoder(weights, looked=True)
    return _best_draft(fast, decoder, candidates, len(prompts), max(prompts), do_sample=do_sample)[0]


def _best_draft(
    fast: FastPath,
    decoder: FastDecoder,
    schedules: Sequence[SkipSchedule],
    sequences: int,
    prompt_length: int,
    kind: LoopKind = "kernels",
    *,
    do_sample: bool,
) -> tuple[SkipSchedule, CostDraftPolicy]:
    """The one of `schedules`, by increasing depth, that is expected to draft best, and its draft policy."""
    solved, weights = fast.solved(), (decoder.weights, decoder.draft_weights)
    full, drafts = solved.lossless_costs(fast.model, *weights, prompt_length)
    records = [fast.draft_record(decoder.weights, each, kind, do_sample=do_sample) for each in schedules]
    policies = [CostDraftPolicy(record, full, solved.sizes.num_layers, drafts) for record in records]
    if len(schedules) == 1:
        return schedules[0], policies[0]
    rejection_rates = optimistic_rejection_rates([policy.rejection_rate for policy in policies])
    rates = [
        policy.rate(sequences, [schedule.min_layers] * MAX_DRAFTS, 1 - rejected)
        for schedule, policy, rejected in zip(schedules, policies, rejection_rates, strict=True)
    ]
    best = rates.index(max(rates))
    return schedules[best], policies[best]


def _warn_once(model: GenerativeModel, over: Over | None, plan: SpeedPlan) -> None:
    """Warn that a target can't be reached, once for each model and target."""
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
    """Raise ConfigError for a call of `generate` that a schedule can't decode, as `skip_generate` says."""
    check_mode(generation_config)
    prepare = vars(unwrap(model)).get("prepare_inputs_for_generation")
    if isinstance(wrapper := getattr(prepare, "__self__", None), nn.Module):
        unwrap(wrapper)  # peft sets this on its base model and calls its generate; unwrap refuses prompt tuning
    if not model_kwargs.get("use_cache", True):
        raise ConfigError("use_cache is False: skip_generate needs the cache")
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length() > 0:
        raise ConfigError("past_key_values already holds tokens: skip_generate starts from a prompt and an empty cache")
    if getattr(cache, "offloading", False):
        raise ConfigError("the cache is offloaded: it would fetch the keys and values of skipped layers too")
    if generation_config.output_attentions or generation_config.output_hidden_states:
        raise ConfigError("output_attentions and output_hidden_states are not supported: layers differ between steps")
    _check_positions(model, input_ids, generation_config.max_length, model_kwargs)


def check_mode(generation_config: GenerationConfig) -> None:
    """Raise ConfigError for beam search and other modes than greedy decoding and sampling."""
    if (generation_config.num_beams or 1) > 1:
        raise ConfigError(f"num_beams is {generation_config.num_beams}: skip_generate decodes greedily or samples")
    mode = generation_config.get_generation_mode(argument_of_generate("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        name = mode.value.replace("_", " ")
        raise ConfigError(f"{name} is requested: skip_generate decodes greedily or samples")


def check_unhealed(token_healing: object) -> None:
    """Raise ConfigError for token healing in code that counts new tokens: `generate` first strips white space from
    prompts, which changes their lengths.
    """
    if token_healing:
        raise ConfigError(
            f"token_healing is {token_healing!r}, possibly in generation_config.json: prompts are decoded unchanged; "
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
        prompt = int(mask.sum(dim=-1).max()) if mask is not None else prompt_length(input_ids, model_kwargs)
    # The last new token is never an input, so it needs no position.
    needed = prompt + (max_length - input_ids.shape[1] - 1 if max_length is not None else 0)
    if needed > positions:
        raise ConfigError(
            f"the longest prompt has {prompt} tokens, {needed} positions are needed and the model has {positions}: "
            "shorten the prompt or lower max_new_tokens"
        )
