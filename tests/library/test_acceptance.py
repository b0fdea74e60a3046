"""The acceptance rule, and the kernels held against it."""

from typing import Any

import pytest
import torch
from fastpath_cases import SCHEDULES, tiny
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ragged_prompts

from skipdecode.fastpath.sequences import DraftRule, RunningSequences
from skipdecode.generate.acceptance import accept_greedy, accepted_tokens
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.runners import LosslessRunner
from skipdecode.kernels.cpu import kernels


@given(st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 1), min_size=6, max_size=6))
def test_full_depths_tokens_are_accepted_up_to_the_first_that_differs_from_its_draft(
    drafts: list[int], chosen: list[int]
) -> None:
    read: list[int] = []
    new = list(accepted_tokens(drafts, (read.append(token) or token for token in chosen)))
    accepted = len(new) - 1
    assert new == chosen[: len(new)] == read, "and no token is chosen after those"
    assert new[:accepted] == drafts[:accepted]
    assert accepted == len(drafts) or new[accepted] != drafts[accepted]


@pytest.mark.skipif(kernels() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("weights", ["packed", "int8"])
@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["decaying", "full depth", "evenly placed"])
def test_a_round_of_the_kernels_accepts_what_the_acceptance_rule_accepts(
    schedule: Any, name: str, weights: Any
) -> None:
    ids, mask = ragged_prompts([4, 7, 5], 4)
    count, rounds = 4, 3
    with torch.inference_mode():
        decoder = fast_path(tiny(name)).decoder(weights)
        ours, theirs = (LosslessRunner(decoder, 40, mask) for _ in range(2))
        sequences = [[int(token)] for token in theirs.prefill(ids).argmax(dim=-1)]
        ours.prefill(ids)
        first = torch.tensor([tokens[0] for tokens in sequences])
        layers = [schedule.layers_at(n) for n in range(count)]
        rule = DraftRule([-1.0] * count, [1.0], [1.0])
        by_kernels = ours.draft(RunningSequences(first, range(3), [0] * 3, [30] * 3, ()), layers, rule, rounds)
        assert by_kernels is not None
        for drafted, accepted in zip(by_kernels.drafted, by_kernels.accepted, strict=True):
            assert drafted == [count] * 3
            starts = [len(tokens) - 1 for tokens in sequences]
            drafts: list[list[int]] = [[] for _ in sequences]
            for n in range(count):
                last = torch.tensor([(tokens + new)[-1] for tokens, new in zip(sequences, drafts, strict=True)])
                logits = theirs.run(last, [start + n for start in starts], [1] * 3, layers[n])
                for new, token in zip(drafts, logits.argmax(dim=-1).tolist(), strict=True):
                    new.append(token)
            inputs = torch.tensor([[tokens[-1], *new] for tokens, new in zip(sequences, drafts, strict=True)])
            scores = theirs.run(inputs.flatten(), starts, [count + 1] * 3)
            found = accept_greedy(drafts, scores)
            assert accepted == [len(new) - 1 for new in found]
            for tokens, new in zip(sequences, found, strict=True):
                tokens += new
    for n, tokens in enumerate(sequences):
        chosen = by_kernels.chosen
        assert chosen.tokens[n, : chosen.counts[n]].tolist() == tokens[1:]
