"""Lossless decoding beside transformers' own ways to a model's greedy text: texts a second, one prompt at a time.

    python train.py --recipe e2e-tiny data.path=E2E_FOLDER model.shape=llama-tiny \\
        model.config=null output.dir=outputs/llama
    skipdecode calibrate outputs/llama
    python scripts/benchmark_assisted.py --checkpoint outputs/llama --data-dir E2E_FOLDER

Each prompt is continued by all in turns: transformers' generate as it is, with the first layers of the model drafting
(`assistant_early_exit`, LayerSkip), with words of the prompt (`prompt_lookup_num_tokens`); and skip_generate at full
depth and lossless. Seconds are of whole calls, prompt and decoding, on a float32 model; ratios are medians over prompts
[quartiles]. Transformers drafts so only for some families: Llama's is one, OPT's isn't.
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
    parser.add_argument("--limit", type=int, default=60, help="prompts, drawn evenly over all lengths (default 60)")
    parser.add_argument("--speedup", type=float, nargs="+", default=[3, 4], help="that draft (default 3 4)")
    parser.add_argument(
        "--early-exit", type=int, nargs="+", default=[2, 4, 6], metavar="N", help="first layers that draft"
    )
    parser.add_argument(
        "--lookup", type=int, nargs="+", default=[3], metavar="N", help="words of the prompt that draft"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        loaded = load_request(Request(options.checkpoint, Path(output), data_dir=options.data_dir))
    model: Any = loaded.checkpoint.model
    full_depth = SkipSchedule.full_depth(len(decoder_layers(model)))
    lossless = {"custom_generate": skip_generate, "lossless": True}
    systems: dict[str, dict[str, Any]] = {
        PLAIN: {},
        **{f"{PLAIN}, the first {n} layers draft": {"assistant_early_exit": n} for n in options.early_exit},
        **{f"{PLAIN}, {n} words of the prompt draft": {"prompt_lookup_num_tokens": n} for n in options.lookup},
        FULL: {"custom_generate": skip_generate, "schedule": full_depth},
        **{f"lossless, drafted at {speedup:g}x": {**lossless, "speedup": speedup} for speedup in options.speedup},
        "lossless, auto": lossless,
    }
    lengths = [len(ids) for ids in loaded.prompt_ids]
    prompts = [loaded.prompt_ids[n] for n in spread_over_lengths(lengths, options.limit)]
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    same = dict.fromkeys(systems, 0)
    tokens = 0
    names = list(systems)
    for number, prompt in enumerate(track([prompts[0], *prompts], "prompts", console=Console(stderr=True))):
        ids = torch.tensor([prompt])
        texts = {}
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            start = time.perf_counter()
            text = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=loaded.max_new_tokens,
                do_sample=False,
                **systems[name],
            )
            texts[name] = text[0, len(prompt) :].tolist()
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
        if number:
            tokens += len(texts[PLAIN])
            for name, text in texts.items():
                same[name] += text == texts[PLAIN]
    rows = []
    for name, own in seconds.items():
        over = [str(Ratio.of(seconds[base], own)) for base in (PLAIN, FULL)]
        rows.append([name, f"{sum(own) / tokens * 1e3:.2f}", *over, f"{same[name]} of {len(prompts)}"])
    print(Table(["", "ms a token", f"over {PLAIN}", f"over {FULL}", "same texts"], rows).to_markdown())
    print(
        f"\n{options.checkpoint}, {len(prompts)} prompts, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
