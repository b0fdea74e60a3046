"""Lossless decoding of a shape with random weights: what drafts and verifications cost, and the speed that follows.

    python scripts/benchmark_lossless.py --shape opt-1.3b --dtype bfloat16 --weights packed int8 --speedup 4

Random weights have no meaningful acceptance rate, so it is SIMULATED: a draft is accepted with the probability that
--acceptance gives, whatever full depth says; all passes are run. In each repeat every acceptance rate takes turns with
full depth; ratios are medians over repeats [quartiles]. This machine is calibrated first, as by skipdecode calibrate.

c is the cost of a draft step and V(k) that of a verification of k positions, in steps of full depth. The prediction for
sequences that don't end follows from them and the acceptance rate a, with the best number of drafts g (Leviathan et al.
2023, theorem 3.8): (1 - a^(g + 1)) / (1 - a) / (g c + V(g + 1)).
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track

from configs.shapes import random_model, read_shape
from eval.speed.peers import SkipDecode
from eval.tables import Table
from skipdecode import SkipSchedule, solve_schedule
from skipdecode.cli.process import run_command
from skipdecode.fastpath.sequences import ChosenTokens, DraftedRounds, RunningSequences
from skipdecode.generate import lossless_loop as lossless
from skipdecode.generate.draft_policy import MAX_DRAFTS
from skipdecode.generate.fast_path import fast_path
from skipdecode.generate.runners import LosslessRunner
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.cost import interpolated
from skipdecode.timing.calibrate import measure_profile
from skipdecode.timing.interleave import Ratio, order_of_turn

COLUMNS = (1, 2, 3, 4, 6, 8, 13)


class Drafted(SkipDecode):
    """`skip_generate(lossless=True)` with a simulated acceptance rate."""

    def __init__(self, model: torch.nn.Module, schedule: SkipSchedule, weights: Weights, acceptance: float) -> None:
        super().__init__(model, schedule, weights, f"lossless at {acceptance:g}")
        self._options["lossless"] = True
        self._acceptance = acceptance

    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        draw = random.Random(0)

        def simulated(drafts: Sequence[Sequence[int]], scores: torch.Tensor) -> list[list[int]]:
            chosen, found, at = scores.argmax(dim=-1).tolist(), [], 0
            for drafted in drafts:
                taken = next((n for n in range(len(drafted)) if draw.random() >= self._acceptance), len(drafted))
                found.append([*drafted[:taken], chosen[at + taken]])
                at += len(drafted) + 1
            return found

        def draft(runner: LosslessRunner, texts: RunningSequences, *rest: Any) -> DraftedRounds | None:
            """One round of the kernels, in which the number of accepted drafts is drawn."""
            found = own(runner, texts, *rest[:-1], 1)
            if found is None:
                return None
            (drafted,) = found.drafted
            agreed = [next((n for n in range(count) if draw.random() >= self._acceptance), count) for count in drafted]
            counts = [min(most, same + 1) for most, same in zip(texts.max_tokens, agreed, strict=True)]
            tokens = texts.tokens[:, None].repeat(1, max(counts))  # whatever they are
            return found._replace(chosen=ChosenTokens(tokens, counts), accepted=[agreed])

        own = LosslessRunner.draft
        with mock.patch.object(lossless, "accept_greedy", simulated), mock.patch.object(LosslessRunner, "draft", draft):
            return super().run(ids, new_tokens)


def verification_seconds(model: torch.nn.Module, ids: torch.Tensor, weights: Weights, repeats: int) -> dict[int, float]:
    """Number of positions -> median seconds of a full-depth pass through them, for one sequence, timed in turns."""
    runner = LosslessRunner(fast_path(model).decoder(weights), 64, torch.ones_like(ids))
    runner.prefill(ids)
    seconds: dict[int, list[float]] = {count: [] for count in COLUMNS}
    for repeat in range(4 * repeats + 1):
        for count, found in order_of_turn(list(seconds.items()), repeat):
            runner.roll_back(8)
            start = time.perf_counter()
            runner.run(ids[0, :1].repeat(count), [8], [count])
            if repeat:  # the first warms up
                found.append(time.perf_counter() - start)
    return {count: statistics.median(found) for count, found in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="opt-small", help="a name in configs/model/, or a YAML file")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--weights", nargs="+", choices=get_args(Weights), default=["packed"])
    parser.add_argument("--speedup", type=float, default=4, help="that drafts (default 4)")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0, 0.85, 0.9, 0.95, 0.98])
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model = random_model(read_shape(options.shape, "--shape"), getattr(torch, options.dtype)).eval()
    ids = torch.randint(4, 1000, (1, options.prompt_length), generator=torch.Generator().manual_seed(0))
    rows = []
    with tempfile.TemporaryDirectory() as caches:
        os.environ["XDG_CACHE_HOME"] = caches  # where skip_generate finds the clock
        for weights in options.weights:
            at_hand = {"weights": weights, "repeats": options.repeats}
            profile = measure_profile(
                model, batch_sizes=[1, 2, 4, 8], prompt_lengths=[options.prompt_length], **at_hand
            ).profile
            profile.save()
            cost = profile.at(prompt_length=options.prompt_length)
            schedule = solve_schedule(cost, options.speedup, horizon=options.new_tokens)
            full = SkipDecode(model, SkipSchedule.full_depth(profile.num_layers), weights, "full depth")
            draft = SkipDecode(model, schedule, fast_path(model).decoder(weights).draft_weights, "draft")
            decoders: list[SkipDecode] = [full, draft]
            for number, share in enumerate(options.acceptance):
                own = replace(schedule, horizon=schedule.horizon + number)  # drafts are remembered by schedule
                decoders.append(Drafted(model, own, weights, share))
            seconds: dict[str, list[float]] = {decoder.name: [] for decoder in decoders}
            for repeat in track(range(options.repeats + 1), f"{weights} weights", console=Console(stderr=True)):
                for decoder in order_of_turn(decoders, repeat):
                    taken = decoder.run(ids, options.new_tokens)[1]
                    if repeat:
                        seconds[decoder.name].append(taken)
            verify = verification_seconds(model, ids, weights, options.repeats)
            speeds = {name: Ratio.of(seconds["full depth"], own) for name, own in seconds.items()}
            c = 1 / speeds["draft"].median
            costs = {count: taken / verify[1] for count, taken in verify.items()}
            rounds = [drafts * c + interpolated(costs, drafts + 1) for drafts in range(MAX_DRAFTS + 1)]
            print(f"{weights}: c {c:.3f}, V {', '.join(f'{k}: {v:.2f}' for k, v in costs.items())}", flush=True)
            for share in options.acceptance:
                predicted = max(sum(share**n for n in range(g + 1)) / rounds[g] for g in range(len(rounds)))
                speed = speeds[f"lossless at {share:g}"]
                ratio = speed.median / predicted
                rows.append([weights, f"{share:g}", f"{predicted:.2f}x", str(speed), f"{ratio:.2f}"])
    print(
        Table(
            ["weights", "acceptance (simulated)", "predicted", "measured", "measured / predicted"], rows
        ).to_markdown()
    )
    print(f"\n{options.shape}, {options.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
