"""Systems that decode a test set say what their steps read."""

from pathlib import Path

import pytest
import torch
from small_checkpoints import save_checkpoint

from eval.loading import load_checkpoint
from eval.results import Threshold
from eval.systems.base import SkipSystem
from eval.systems.calm import CalmSystem
from skipdecode import SkipSchedule


@pytest.mark.parametrize("confidence", [None, 0.0, 2.0])
def test_the_bytes_of_a_batch_are_those_of_the_steps_that_were_run(tmp_path: Path, confidence: float | None) -> None:
    checkpoint = load_checkpoint(str(save_checkpoint(tmp_path / "model", 4)), None, torch.device("cpu"))
    config = checkpoint.model.config
    schedule = SkipSchedule(num_layers=4, max_layers=3, min_layers=1, horizon=6)
    if confidence is None:
        system: SkipSystem | CalmSystem = SkipSystem("2x", checkpoint, schedule)
    else:
        system = CalmSystem("calm", checkpoint, Threshold(confidence))
    checkpoint.tokenizer.eos_token = "<none>"  # never chosen: every text has all of its tokens
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
