"""Measure an engine's tokens per second, beside a static batch and transformers' continuous batching.

    python scripts/benchmark_engine.py --shape opt-1.3b --vocab-size 50272 --dtype bfloat16 --requests 1 8 32 128

Weights and prompts are random. All requests arrive at once. Each system decodes them in turn; tokens per second are
medians over repeats, ratios have quartiles. A static batch is `skip_generate` with all prompts, which have one length.
transformers runs every layer.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track
from transformers import ContinuousBatchingConfig, GenerationConfig

from eval.tables import Table
from scripts.random_models import DEVICE, make_model, make_parser, seconds
from skipdecode import Engine, SkipSchedule, skip_generate, solve_schedule
from skipdecode.cli.process import run_command
from skipdecode.timing.interleave import Ratio, order_of_turn

WARM_UP = 3  # turns in which graphs are captured and kernels compiled
STATIC, ENGINE, PEER = "static batch", "engine", "transformers"


def main() -> int:
    parser = make_parser(__doc__, speedups=[1, 3], repeats=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128])
    options = parser.parse_args()
    model = make_model(options).eval()
    length, new_tokens = options.prompt_length, options.new_tokens
    engine = Engine(model, most_rows=max(options.requests), wave_tokens=max(256, 32 * length), prefix_mib=0)
    # No end token: every sequence is decoded to its full length.
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    asked = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    slots = max(options.requests) * (length + new_tokens)
    memory = ContinuousBatchingConfig(
        block_size=32, num_blocks=slots // 32 + 128, max_batch_tokens=max(512, slots // 4)
    )
    rows = []
    for requests in options.requests:
        ids = torch.randint(4, options.vocab_size, (requests, length), device=DEVICE)
        prompts = ids.tolist()

        def through_engine(schedule: SkipSchedule, prompts: list[list[int]] = prompts) -> None:
            answers = [engine.submit(prompt, schedule=schedule, **settings) for prompt in prompts]
            while engine.step():
                pass
            for answer in answers:
                answer.result(0)

        def in_a_batch(schedule: SkipSchedule, ids: torch.Tensor = ids) -> None:
            mask = torch.ones_like(ids)
            how = {"custom_generate": skip_generate, "schedule": schedule, "pad_token_id": 0}
            model.generate(ids, attention_mask=mask, **how, **settings)

        runs: dict[tuple[str, float], Callable[[], Any]] = {}
        for target in options.speedup:
            schedule = SkipSchedule.full_depth(model.config.num_hidden_layers)
            if target > 1:
                schedule = solve_schedule(model, target, horizon=new_tokens)
            runs[STATIC, target] = lambda schedule=schedule: in_a_batch(schedule)
            runs[ENGINE, target] = lambda schedule=schedule: through_engine(schedule)
        runs[PEER, 1] = lambda prompts=prompts: model.generate_batch(prompts, asked, memory, persistent_manager=True)
        times: dict[tuple[str, float], list[float]] = {run: [] for run in runs}
        progress = track(range(options.repeats + WARM_UP), f"{requests} requests", console=Console(stderr=True))
        for turn in progress:
            for run in order_of_turn([*runs], turn):
                taken = seconds(runs[run])
                if turn >= WARM_UP:
                    times[run].append(taken)
        for (system, target), taken in times.items():
            speed = f"{requests * new_tokens / statistics.median(taken):,.0f}"
            beside = [str(Ratio.of(times[other, of], taken)) for other, of in ((STATIC, target), (PEER, 1))]
            rows.append((str(requests), system, f"{target:g}x", speed, *beside))
    headers = ("requests", "system", "target", "tokens/s", "over a static batch", "over transformers")
    Console().print(Table(headers, rows, f"{options.shape}, {options.dtype}, {DEVICE}").to_rich())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
