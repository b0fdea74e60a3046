"""The schedules that follow from a model's config: of speedups, and of drafts where none is named."""

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
from skipdecode.generate.draft_policy import PassSeconds, pass_seconds
from skipdecode.kernels.cpu import kernels
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import CostModel
from skipdecode.schedule.machine_profile import Profile, profile_name, read_profile, setting_of
from skipdecode.schedule.plan import SpeedPlan
from skipdecode.schedule.schedule import Over, SkipSchedule, check_order

MOST_SOLVED = 1000  # schedules that are kept of a model
DRAFTS = 4  # depths that may draft where none is named: so many multiples of a twelfth of the layers
UNTRAINED_DRAFTS = (1 / 3, 1 / 2, 2 / 3, 5 / 6)  # fractions of the layers that may, where only their order is known


class SolvedSchedules:
    """Schedules of one model, each solved once.

    Args:
        model: a transformers model.

    Attributes:
        config: what it was trained for; None for a model that wasn't trained to skip.
        sizes: of the model.
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
        """Whether all of it still follows from the model's config, depth and type."""
        return self._origin == _origin(model)

    def profile(self, model: PreTrainedModel, weights: Weights) -> Profile | None:
        """What was measured of this machine's clock for the model, if it was."""
        key = (weights, model.device, torch.get_num_threads(), kernels())
        name = self._profile_names.get(key)
        if name is None:
            name = self._profile_names[key] = profile_name(setting_of(model, self.sizes, weights))
        return read_profile(name)

    def plan(
        self, speedup: float, over: Over | None, prompts: Sequence[int] | None, profile: Profile | None
    ) -> SpeedPlan:
        """What a speedup is decoded with in a batch."""
        assert self.config is not None
        asked = (speedup, over, tuple(prompts) if prompts is not None else None, profile)
        found = self._plans.get(asked)
        if found is not None:
            return found
        batches = None if prompts is None else [prompts]
        conditions = self.config.conditions_at_hand(batches, measured=profile is not None)
        names = ("batch_size", "prompt_length", "prompt_tokens", "expected_steps")
        at_hand = [conditions.get(name) for name in names]
        key = (speedup, over, *at_hand, profile)
        found = self._plans.get(key)
        if len(self._plans) >= MOST_SOLVED:
            self._plans.clear()
        if found is None:
            found = self._plans[key] = self.config.plan_for(
                self.sizes, speedup, over=over, prompts=batches, profile=profile
            )
            if found.reached:
                _warn_beyond(self.config, speedup)
        self._plans[asked] = found
        return found

    def draft_candidates(self, order: Sequence[int] | None = None) -> list[SkipSchedule]:
        """The schedules that may draft where none is named, of more and more layers that stay.

        Budgets needn't fall: what drafts attend to are full depth's keys and values. The layers are the first ones of
        an order, or those of the fastest speed that the model was trained for.

        Raises ConfigError where there is no order and its config names no speed above 1, and for what is no order.
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
                "it was trained for: pass schedule=..., which drafts, or order=..., as `skipdecode order` finds it"
            )
        fastest = trained[max(trained)]
        step = max(fastest.min_layers, round(fastest.num_layers / 12))
        depths = [min(step * (n + 1), fastest.num_layers) for n in range(DRAFTS)]
        return [replace(fastest, max_layers=depth, min_layers=depth) for depth in dict.fromkeys(depths)]

    def lossless_costs(
        self, model: PreTrainedModel, weights: Weights, draft_weights: Weights, prompt_length: int
    ) -> tuple[PassSeconds, PassSeconds]:
        """The time of a pass at full depth, and of one of drafts, by this machine's calibrated profile where there is
        one (`skipdecode calibrate`); drafts whose own weights weren't timed cost less by as much as they read and
        compute less.

        Prompts count by the next multiple of 16, and what was worked out is kept: every call asks.
        """
        kinds = (weights, draft_weights)
        profiles = [self.profile(model, each) for each in kinds]
        length = -(-prompt_length // 16) * 16
        key = (*kinds, *profiles, length)
        if key not in self._pass_seconds:
            if len(self._pass_seconds) >= MOST_SOLVED:
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


def _warn_beyond(config: SkipConfig, speedup: float) -> None:
    trained = config.trained_range
    if trained is not None and not trained[0] <= speedup <= trained[1]:
        logging.get_logger("transformers.skipdecode").warning(
            f"speedup {speedup:g} lies outside of {trained[0]:g} to {trained[1]:g}, for which this model was trained: "
            "expect worse texts"
        )
