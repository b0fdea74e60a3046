"""Compare lossless decoding with transformers' methods of faster greedy decoding, one prompt at a time.

    python train.py --recipe e2e-tiny data.path=E2E_FOLDER model.shape=llama-tiny \\
        model.config=null output.dir=outputs/llama
    skipdecode calibrate outputs/llama
    python scripts/benchmark_assisted.py --checkpoint outputs/llama --data-dir E2E_FOLDER

Every prompt is decoded by each method in turn: transformers' plain generate, its early-exit drafting with the model's
first layers (`assistant_early_exit`, LayerSkip) and its prompt lookup (`prompt_lookup_num_tokens`); and skip_generate
at full depth and lossless. Times are end-to-end (prefill + decode), on a float32 model; ratios are medians over prompts
[quartiles]. Transformers supports early-exit drafting for some families, such as Llama but not OPT.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.progress import track

from eval.decoding import spread_over_lengths
from eval.loading import load_request
from eval.request import Request
from eval.tables import Table
from skipdecode import SkipSchedule, skip_generate
from skipdecode.cli.process import run_command
from skipdecode.families import decoder_layers
from skipdecode.timing.interleave import Ratio

PLAIN, FULL = "transformers", "full depth"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--limit", type=int, default=60, help="prompts, evenly spaced by length (default 60)")
    parser.add_argument(
        "--speedup", type=float, nargs="+", default=[3, 4], help="target speedups of the drafts (default 3 4)"
    )
    parser.add_argument(
        "--early-exit",
        type=int,
        nargs="+",
        default=[2, 4, 6],
        metavar="N",
        help="numbers of layers for early-exit drafts",
    )
    parser.add_argument(
        "--lookup", type=int, nargs="+", default=[3], metavar="N", help="numbers of tokens for prompt lookup"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        loaded = load_request(Request(options.checkpoint, Path(output), data_dir=options.data_dir))
    model: Any = loaded.checkpoint.model
    full_depth = SkipSchedule.full_depth(len(decoder_layers(model)))
    lossless = {"custom_generate": skip_generate, "lossless": True}
    systems: dict[str, dict[str, Any]] = {
        PLAIN: {},
        **{f"{PLAIN}, drafts by {n} layers": {"assistant_early_exit": n} for n in options.early_exit},
        **{f"{PLAIN}, prompt lookup of {n} tokens": {"prompt_lookup_num_tokens": n} for n in options.lookup},
        FULL: {"custom_generate": skip_generate, "schedule": full_depth},
        **{f"lossless, drafts at {speedup:g}x": {**lossless, "speedup": speedup} for speedup in options.speedup},
        "lossless, automatic": lossless,
    }
    lengths = [len(ids) for ids in loaded.prompt_ids]
    prompts = [loaded.prompt_ids[n] for n in spread_over_lengths(lengths, options.limit)]
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    same = dict.fromkeys(systems, 0)
    tokens = 0
    names = list(systems)
    for number, prompt in enumerate(track([prompts[0], *prompts], "prompts", console=Console(stderr=True))):
        ids = torch.tensor([prompt])
        sequences = {}
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            start = time.perf_counter()
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=loaded.max_new_tokens,
                do_sample=False,
                **systems[name],
            )
            sequences[name] = output[0, len(prompt) :].tolist()
            if number:  # the first prompt warms up
                seconds[name].append(time.perf_counter() - start)
        if number:
            tokens += len(sequences[PLAIN])
            for name, sequence in sequences.items():
                same[name] += sequence == sequences[PLAIN]
    rows = []
    for name, own in seconds.items():
        over = [str(Ratio.of(seconds[base], own)) for base in (PLAIN, FULL)]
        rows.append([name, f"{sum(own) / tokens * 1e3:.2f}", *over, f"{same[name]} of {len(prompts)}"])
    headers = ["", "ms per token", f"speedup over {PLAIN}", f"speedup over {FULL}", "identical outputs"]
    print(Table(headers, rows).to_markdown())
    print(
        f"\n{options.checkpoint}, {len(prompts)} prompts, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
