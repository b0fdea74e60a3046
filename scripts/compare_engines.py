"""Check that a standalone export gives the same tokens in other engines as its checkpoint.

    skipdecode export outputs/constant outputs/plain --speedup 3 --standalone
    python scripts/compare_engines.py --checkpoint outputs/constant --export outputs/plain --speedup 3 \\
        --data-dir E2E_FOLDER

The checkpoint decodes its task's test prompts greedily with skip_generate under the schedule of that speed. The export
is decoded by transformers' generate in batches, by its continuous batching (generate_batch) and by CTranslate2 on CPU,
if that is installed (pip install 'skipdecode[speed]'). The exit status is 1 if an output differs, which may happen in
float32 where the probabilities of the two best tokens differ by less than the engines' rounding.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import ContinuousBatchingConfig, GenerationConfig

from eval.decoding import batches_of_like_length
from eval.loading import load_request
from eval.request import Request
from skipdecode import load, skip_generate
from skipdecode.cli.process import run_command

Sequences = list[list[int]]  # token ids of each generated sequence, up to its end token
BATCH_SIZE = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="trained with schedule.decay=constant schedule.prompt=max")
    add("--export", required=True, metavar="DIR", help="its export by `skipdecode export --standalone`")
    add("--speedup", required=True, type=float, metavar="X", help="speedup for which it was exported")
    add("--data-dir", metavar="DIR", help="the task's local folder; default: the Hub, or built in")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    options = parser.parse_args()
    # Only to load: nothing is written.
    request = Request(options.checkpoint, Path("unused"), data_dir=options.data_dir, limit=options.limit, device="cpu")
    loaded = load_request(request)
    prompts, max_new_tokens, tokenizer = loaded.prompt_ids, loaded.max_new_tokens, loaded.checkpoint.tokenizer
    schedule = loaded.config.plan_for(loaded.checkpoint.cost, options.speedup, strict=True).schedule
    plain, _ = load(options.export)
    expected = generate(
        loaded.checkpoint.model, tokenizer, prompts, max_new_tokens, custom_generate=skip_generate, schedule=schedule
    )
    engines: dict[str, Callable[[], Sequences]] = {
        "transformers, generate": lambda: generate(plain, tokenizer, prompts, max_new_tokens),
        "transformers, generate_batch": lambda: batch_continuously(plain, tokenizer, prompts, max_new_tokens),
        "CTranslate2": lambda: ctranslate2(options.export, tokenizer, prompts, max_new_tokens),
    }
    print(f"{sum(map(len, expected))} tokens under {schedule}")
    status = 0
    for name, decode in engines.items():
        try:
            found = decode()
        except ImportError:
            print(f"{name}: not installed")
            continue
        same = sum(text == other for text, other in zip(found, expected, strict=True))
        print(f"{name}: {same} of {len(expected)} outputs are identical")
        status = max(status, int(same < len(expected)))
    return status


def generate(model: Any, tokenizer: Any, prompts: Sequences, max_new_tokens: int, **how: Any) -> Sequences:
    """By `model.generate`, in batches."""
    texts: Sequences = [[] for _ in prompts]
    for batch in batches_of_like_length(prompts, BATCH_SIZE):
        inputs = tokenizer.pad({"input_ids": [prompts[n] for n in batch]}, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **how)
        for n, row in zip(batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            texts[n] = before_end(row, tokenizer)
    return texts


def batch_continuously(model: Any, tokenizer: Any, prompts: Sequences, max_new_tokens: int) -> Sequences:
    """By transformers' continuous batching."""
    asked = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    memory = ContinuousBatchingConfig(block_size=32, num_blocks=256, max_batch_tokens=512)
    outputs = model.generate_batch(prompts, asked, memory, warmup=False).values()
    by_prompt = {tuple(output.prompt_ids): before_end(output.generated_tokens, tokenizer) for output in outputs}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def ctranslate2(folder: str, tokenizer: Any, prompts: Sequences, max_new_tokens: int) -> Sequences:
    """By CTranslate2, in float32. Raises ImportError where it isn't installed."""
    import ctranslate2

    with tempfile.TemporaryDirectory() as converted:
        ctranslate2.converters.TransformersConverter(folder).convert(converted, force=True)
        generator = ctranslate2.Generator(converted)
        results = generator.generate_batch(
            [tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts],
            max_batch_size=BATCH_SIZE,
            max_length=max_new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
    return [before_end(result.sequences_ids[0], tokenizer) for result in results]


def before_end(row: list[int], tokenizer: Any) -> list[int]:
    """A sequence up to its end token, without it."""
    row = list(row)
    return row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row


if __name__ == "__main__":
    sys.exit(run_command(main))
