"""The schedules that follow from a model's config: for target speedups, and for drafts if no schedule is given."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from skipdecode.checkpoint.skip_config import CONFIG_KEY, SkipConfig
from skipdecode.errors import ConfigError
from skipdecode.families import decoder_layers
from skipdecode.generate.pass_seconds import PassSeconds, pass_seconds
from skipdecode.kernels.cpu import kernels
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import CostModel
from skipdecode.schedule.machine_profile import Profile, profile_name, profile_setting, read_profile
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import Over, SkipSchedule, check_order

MAX_SOLVED = 1000  # results that are kept for a model
DRAFT_CANDIDATES = 4  # draft depths of a trained model: multiples of a twelfth of its layers
UNTRAINED_DRAFTS = (1 / 3, 1 / 2, 2 / 3, 5 / 6)  # draft depths by an order of layers, as fractions of the layers


class SolvedSchedules:
    """The schedules of one model; each is solved once.

    Attributes:
        config: the schedules that it was trained for; None if it wasn't trained to skip.
        sizes: the model's analytical cost model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._origin = copy.deepcopy(_origin(model))
        self.config = SkipConfig.of(model.config)
        self.sizes = CostModel.of(model)
        self._plans: dict[Any, SpeedPlan] = {}
        self._drafts: dict[tuple[int, ...] | None, list[SkipSchedule]] = {}
        self._profile_names: dict[Any, str] = {}
        self._pass_seconds: dict[Any, tuple[PassSeconds, PassSeconds]] = {}

    def still_holds(self, model: PreTrainedModel) -> bool:
        """Whether the model's config, depth and dtype are still those that the schedules were solved for."""
        return self._origin == _origin(model)

    def profile(self, model: PreTrainedModel, weights: Weights) -> Profile | None:
        """The calibrated profile of this machine for the model; None if there is none."""
        key = (weights, model.device, torch.get_num_threads(), kernels())
        name = self._profile_names.get(key)
        if name is None:
            name = self._profile_names[key] = profile_name(profile_setting(model, self.sizes, weights))
        return read_profile(name)

    def plan(
        self, speedup: float, over: Over | None, prompts: Sequence[int] | None, profile: Profile | None
    ) -> SpeedPlan:
        """The plan for a target speedup of a batch with prompts of these lengths."""
        assert self.config is not None
        request = (speedup, over, tuple(prompts) if prompts is not None else None, profile)
        found = self._plans.get(request)
        if found is not None:
            return found
        batches = None if prompts is None else [prompts]
        conditions = self.config.conditions_at_hand(batches, measured=profile is not None)
        names = ("batch_size", "prompt_length", "prompt_tokens", "expected_steps")
        values = [conditions.get(name) for name in names]
        key = (speedup, over, *values, profile)
        found = self._plans.get(key)
        if len(self._plans) >= MAX_SOLVED:
            self._plans.clear()
        if found is None:
            found = self._plans[key] = self.config.plan_for(
                self.sizes, speedup, over=over, prompts=batches, profile=profile
            )
            if found.reached:
                _warn_untrained(self.config, speedup)
        self._plans[request] = found
        return found

    def draft_candidates(self, order: Sequence[int] | None = None) -> list[SkipSchedule]:
        """Constant schedules that may draft if none is given, by increasing depth.

        Budgets needn't decay, because drafts attend to full depth's keys and values. The layers are the first ones of
        `order`, or without one those of the fastest speed that the model was trained for. Raises ConfigError for an
        invalid order, and without one if the model's config names no speed above 1.
        """
        key = None if order is None else check_order(order, self.sizes.num_layers)
        if key not in self._drafts:
            self._drafts[key] = self._drafts_of_training() if key is None else self._drafts_of_order(key)
        return self._drafts[key]

    def _drafts_of_order(self, order: tuple[int, ...]) -> list[SkipSchedule]:
        depth = len(order)
        budgets = dict.fromkeys(max(1, round(share * depth)) for share in UNTRAINED_DRAFTS)
        return [
            SkipSchedule(depth, budget, budget, placement="order", order=order, decay="constant") for budget in budgets
        ]

    def _drafts_of_training(self) -> list[SkipSchedule]:
        trained = self.config.schedules if self.config else {}
        if max(trained, default=1) <= 1:
            raise ConfigError(
                "lossless is True without a schedule or a speedup, and this model's config names no speed above 1 that "
                "it was trained for: pass the schedule that drafts, or order=... as found by `skipdecode order`"
            )
        fastest = trained[max(trained)]
        step = max(fastest.min_layers, round(fastest.num_layers / 12))
        depths = [min(step * (n + 1), fastest.num_layers) for n in range(DRAFT_CANDIDATES)]
        return [replace(fastest, max_layers=depth, min_layers=depth) for depth in dict.fromkeys(depths)]

    def lossless_costs(
        self, model: PreTrainedModel, weights: Weights, draft_weights: Weights, prompt_length: int
    ) -> tuple[PassSeconds, PassSeconds]:
        """The times of a pass at full depth and of a pass that drafts, by a calibrated profile if there is one.

        If drafts use weights that weren't calibrated, the time of the calibrated ones is scaled by the analytical cost
        model. Prompt lengths are rounded up to a multiple of 16 and results are kept, because every call asks.
        """
        kinds = (weights, draft_weights)
        profiles = [self.profile(model, each) for each in kinds]
        length = -(-prompt_length // 16) * 16
        key = (*kinds, *profiles, length)
        if key not in self._pass_seconds:
            if len(self._pass_seconds) >= MAX_SOLVED:
                self._pass_seconds.clear()
            self._pass_seconds[key] = self._costs(kinds, profiles, length)
        return self._pass_seconds[key]

    def _costs(
        self, kinds: Sequence[Weights], profiles: Sequence[Profile | None], prompt_length: int
    ) -> tuple[PassSeconds, PassSeconds]:
        full, drafts = (pass_seconds(self.sizes.stored_as(weights), None, prompt_length) for weights in kinds)
        if profiles[0] is None:
            return full, drafts
        timed, drafts_timed = (
            pass_seconds(self.sizes.stored_as(weights), profile, prompt_length)
            for weights, profile in zip(kinds, profiles, strict=True)
        )
        if profiles[1] is None:
            return timed, functools.cache(
                lambda layers, tokens: timed(layers, tokens) * drafts(layers, tokens) / full(layers, tokens)
            )
        return timed, drafts_timed


def _origin(model: PreTrainedModel) -> tuple[Any, int, torch.dtype]:
    return getattr(model.config, CONFIG_KEY, None), len(decoder_layers(model)), model.dtype


def _warn_untrained(config: SkipConfig, speedup: float) -> None:
    trained = config.trained_range
    if trained is not None and not trained[0] <= speedup <= trained[1]:
        logging.get_logger("transformers.skipdecode").warning(
            f"speedup {speedup:g} is outside the range {trained[0]:g} to {trained[1]:g} that it was trained for: "
            "expect lower quality"
        )
