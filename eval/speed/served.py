"""Decoders of other libraries, each in a process of its own: CTranslate2."""

import contextlib
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from eval.speed.peers import TimedDecoder
from skipdecode import ConfigError

_SETTLE = 0.3  # seconds after which the threads of a process that is done no longer spin


class CTranslate2(TimedDecoder):
    """The same weights in CTranslate2, on CPU.

    Raises ConfigError where it isn't installed, or has no converter for the model.
    """

    def __init__(self, model: PreTrainedModel, compute_type: str) -> None:
        try:
            import ctranslate2
        except ImportError as error:
            raise ConfigError("ctranslate2 is not installed: pip install 'skipdecode[speed]'") from error
        self.name = f"CTranslate2 {compute_type}"
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "model"), str(Path(folder, "converted"))
            model.save_pretrained(source)
            _numbered_tokenizer(model.config.vocab_size).save_pretrained(source)
            try:
                converter = ctranslate2.converters.TransformersConverter(str(source))
                converter.convert(target, quantization=compute_type)
            except (ValueError, NotImplementedError, AttributeError) as error:
                raise ConfigError(f"CTranslate2 can't convert {model.config.model_type}: {error}") from error
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            request = (target, compute_type, torch.get_num_threads(), theirs)
            # In a process of its own: its threads go on spinning for a while after each turn, and in this one they
            # slow down every other decoder, small shapes by two to three times.
            self._process = context.Process(target=_serve_ctranslate2, args=request, daemon=True)
            self._process.start()
            theirs.close()
            try:
                self._connection.recv()  # once it has read the files, which are about to go
            except EOFError as error:
                raise ConfigError("CTranslate2 stopped as it loaded the model: see what it printed above") from error

    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        self._connection.send((ids.tolist(), new_tokens))
        prefill, whole = self._connection.recv()
        time.sleep(_SETTLE)
        return prefill, whole - prefill


def _serve_ctranslate2(folder: str, compute_type: str, threads: int, connection: Connection) -> None:
    """Time what comes down the connection, (prompts, new tokens), until it is closed: (prefill, whole) in seconds."""
    import ctranslate2

    generator = ctranslate2.Generator(folder, "cpu", compute_type=compute_type, intra_threads=threads)

    def seconds(prompts: list[list[str]], new_tokens: int) -> float:
        start = time.perf_counter()
        results = generator.generate_batch(
            prompts,
            max_batch_size=len(prompts),
            min_length=new_tokens,
            max_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        elapsed = time.perf_counter() - start
        lengths = {len(result.sequences_ids[0]) for result in results}
        assert lengths == {new_tokens}, f"CTranslate2 gave {lengths} tokens instead of {new_tokens}"
        return elapsed

    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            ids, new_tokens = connection.recv()
            prompts = [[f"t{token}" for token in row] for row in ids]
            connection.send((seconds(prompts, 1), seconds(prompts, new_tokens)))


def _numbered_tokenizer(size: int) -> Any:
    """A tokenizer whose words are t0, t1, …: CTranslate2 takes prompts as words, and none are at hand."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(size)}, unk_token="t3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t3", bos_token="t2", eos_token="t2", pad_token="t1"
    )
