"""Systems that decode a test set: bytes read, and sequences of given lengths."""

from pathlib import Path

import pytest
import torch
from small_checkpoints import save_checkpoint

from eval.console import make_console
from eval.lineup import profile_of, prompt_lengths_by_batch
from eval.loading import load_checkpoint
from eval.results import Threshold
from eval.systems.base import LosslessSystem, SkipSystem
from eval.systems.calm import CalmSystem
from skipdecode import SkipSchedule
from skipdecode.checkpoint.skip_config import SkipConfig


@pytest.mark.parametrize("confidence", [None, 0.0, 2.0])
def test_the_bytes_read_for_a_batch_are_the_sum_over_its_steps(tmp_path: Path, confidence: float | None) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "model", 4)), None, torch.device("cpu"))
    config = checkpoint.model.config
    schedule = SkipSchedule(num_layers=4, max_layers=3, min_layers=1, horizon=6)
    if confidence is None:
        system: SkipSystem | CalmSystem = SkipSystem("2x", checkpoint, schedule)
    else:
        system = CalmSystem("calm", checkpoint, Threshold(confidence))
    checkpoint.tokenizer.eos_token = "<none>"  # never generated, so every sequence has the maximum length
    found = system.decode([[5, 6, 7, 8], [9, 10]], max_new_tokens=8)
    assert found.steps == 7
    # By hand: a step reads its layers, the final norm and the head; each of 2 rows its cache and embeddings.
    hidden, wide = config.hidden_size, config.ffn_dim
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * wide + wide + hidden + 4 * hidden
    ran = {None: [schedule.budget(i) for i in range(7)], 0.0: [1] * 7, 2.0: [4] * 7}[confidence]
    values = sum(
        layers * layer + 2 * hidden + config.vocab_size * hidden + 2 * (2 * hidden + layers * 2 * hidden * (4 + i + 1))
        for i, layers in enumerate(ran)
    )
    assert found.read_bytes == 4 * values


@pytest.mark.parametrize("confidence", [None, 0.0, 2.0])
def test_every_sequence_gets_its_given_length_by_continuing_or_truncating_its_own_output(
    tmp_path: Path, confidence: float | None
) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "model", 4)), None, torch.device("cpu"))
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    full_depth = SkipSystem("1x", checkpoint, SkipSchedule.full_depth(4))
    system = full_depth if confidence is None else CalmSystem("calm", checkpoint, Threshold(confidence))
    prompts, lengths = [[5, 6, 7, 8], [9, 10], [11, 12, 13]], [3, 9, 1]
    prompt = model.generate(torch.tensor([prompts[1]]), max_new_tokens=9, do_sample=False, eos_token_id=None)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(prompt[0, 6]))  # so its own output is shorter
    found = system.decode(prompts, max_new_tokens=20, lengths=lengths)
    assert found.lengths == lengths
    assert (found.steps, found.tokens) == (8, 2 + 8)
    assert found.layers == {None: 4, 0.0: 1, 2.0: 4}[confidence] * found.tokens
    if confidence != 0.0:  # at full depth the output is that of transformers
        assert system.decode(prompts, max_new_tokens=20).lengths[1] <= 5
        for text, ids, length in zip(found.texts, prompts, lengths, strict=True):
            request = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
            alone = model.generate(torch.tensor([ids]), **request)
            assert text == tokenizer.decode(alone[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", [SkipSystem, LosslessSystem])
def test_outputs_of_one_token_take_no_decode_step(tmp_path: Path, kind: type[SkipSystem]) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "model", 4)), None, torch.device("cpu"))
    system = kind("drafted", checkpoint, SkipSchedule(num_layers=4, max_layers=2, min_layers=1, horizon=6))
    found = system.decode([[5, 6, 7, 8], [9, 10]], max_new_tokens=1)
    assert found.lengths == [1, 1]
    assert found.steps == found.layers == found.batch_layers == found.read_bytes == 0
    # As in the server, each end token of the model's generation settings ends a sequence, not only the tokenizer's.
    checkpoint.model.generation_config.eos_token_id = list(range(checkpoint.model.config.vocab_size))
    assert system.decode([[5, 6, 7, 8], [9, 10]], max_new_tokens=3).lengths == [1, 1]


def test_a_calibration_during_an_evaluation_covers_its_prompt_and_output_lengths(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "model", 2)), None, torch.device("cpu"))
    config = SkipConfig(solver={"horizon": 8, "prompt_length": 40})
    prompts = [[4] * 3, [4] * 5, [4] * 30]
    profile = profile_of(checkpoint, config, (4,), prompts, make_console(quiet=True), calibrate=True)
    assert profile is not None
    timed = {(batch.batch_size, batch.prompt_length) for batch in profile.batches}
    assert timed == {(rows, columns) for rows in (1, 4) for columns in (2, 5, 13)}
    assert config.timed_lengths() == [20, 40, 48], "as skipdecode calibrate has them, which knows no prompts"


def test_schedules_are_solved_for_full_batches_only() -> None:
    prompts = [[4] * 7, [4] * 3, [4] * 5, [4] * 9, [4] * 2]
    assert prompt_lengths_by_batch(prompts, 2) == [[2, 3], [5, 7]]
    assert prompt_lengths_by_batch(prompts, 8) == [[2, 3, 5, 7, 9]], "where there is no other"
