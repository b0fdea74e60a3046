"""Decoders of other libraries, each in a process of its own: CTranslate2 and llama.cpp."""

import contextlib
import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from eval.speed.gguf_file import write_gguf
from eval.speed.llama import GreedyLlama
from eval.speed.peers import TimedDecoder
from skipdecode import ConfigError

_SETTLE = 0.3  # seconds after which the threads of a process that is done no longer spin

# Prompts of one length and new tokens -> seconds of prefill, and of decoding.
Timed: TypeAlias = Callable[[Sequence[list[int]], int], tuple[float, float]]


class ServedDecoder(TimedDecoder):
    """What a process of its own continues.

    In this one its threads, which go on spinning for a while after each turn, would slow down every other decoder,
    small shapes by two to three times. Its library stays out of this one too.
    """

    def __init__(self, name: str, load: Callable[..., Timed], *arguments: Any) -> None:
        """Start the process, and wait until it has loaded the model. Raises ConfigError where it can't.

        Args:
            name: of the decoder.
            load: a function of a module, called in that process.
            arguments: for it.
        """
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, load, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            refused = self._connection.recv()
        except EOFError as error:
            raise ConfigError(f"{name} stopped as it loaded the model: see what it printed above") from error
        if refused is not None:
            raise ConfigError(refused)

    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        self._connection.send((ids.tolist(), new_tokens))
        prefill, decode = self._connection.recv()
        time.sleep(_SETTLE)
        return prefill, decode


def _serve(connection: Connection, load: Callable[..., Timed], arguments: tuple[Any, ...]) -> None:
    """Time what comes down the connection, (prompts, new tokens), until it is closed."""
    try:
        timed = load(*arguments)
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(timed(*connection.recv()))


class CTranslate2(ServedDecoder):
    """The same weights in CTranslate2, on CPU.

    Raises ConfigError where it isn't installed, or has no converter for the model.
    """

    def __init__(self, model: PreTrainedModel, compute_type: str) -> None:
        _check_installed("speed", "ctranslate2")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            _numbered_tokenizer(model.config.vocab_size).save_pretrained(folder)
            arguments = (folder, compute_type, torch.get_num_threads())
            super().__init__(f"CTranslate2 {compute_type}", _load_ctranslate2, *arguments)


def _load_ctranslate2(folder: str, compute_type: str, threads: int) -> Timed:
    import ctranslate2

    converted = str(Path(folder, "converted"))
    try:
        ctranslate2.converters.TransformersConverter(folder).convert(converted, quantization=compute_type)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise ConfigError(f"CTranslate2 can't convert this model: {error}") from error
    generator = ctranslate2.Generator(converted, "cpu", compute_type=compute_type, intra_threads=threads)

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

    def timed(ids: Sequence[list[int]], new_tokens: int) -> tuple[float, float]:
        prompts = [[f"t{token}" for token in row] for row in ids]
        prefill = seconds(prompts, 1)
        return prefill, seconds(prompts, new_tokens) - prefill

    return timed


def _numbered_tokenizer(size: int) -> Any:
    """A tokenizer whose words are t0, t1, …: CTranslate2 takes prompts as words, and none are at hand."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(size)}, unk_token="t3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t3", bos_token="t2", eos_token="t2", pad_token="t1"
    )


class LlamaCpp(ServedDecoder):
    """The same weights in llama.cpp, on CPU, quantised as `Q8_0` or `Q4_0`: 32 inputs share a scale.

    Raises ConfigError where it isn't installed, or where the model is none that it can be given.
    """

    def __init__(self, model: PreTrainedModel, quantization: str) -> None:
        if model.config.model_type != "llama":
            raise ConfigError(f"llama.cpp is a peer of Llama models alone, and this one is {model.config.model_type}")
        _check_installed("llama-cpp", "llama_cpp", "gguf")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.gguf")
            write_gguf(model, path, quantization)
            super().__init__(f"llama.cpp {quantization}", _load_llama_cpp, path, torch.get_num_threads())


def _check_installed(extra: str, *packages: str) -> None:
    """Raises ConfigError for a package that isn't there. None is imported: their libraries stay out of this process."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed: pip install 'skipdecode[{extra}]'")


def _load_llama_cpp(path: Path, threads: int) -> Timed:
    llama = GreedyLlama(path, threads)

    def timed(ids: Sequence[list[int]], new_tokens: int) -> tuple[float, float]:
        continued = llama.run(ids, new_tokens)
        return continued.prefill_seconds, continued.decode_seconds

    return timed
