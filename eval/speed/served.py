"""Peers that run in their own process: CTranslate2 and llama.cpp."""

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

_SETTLE = 0.3  # seconds until idle worker threads of the other process stop spinning

# (prompts of equal length, number of new tokens) -> (prefill seconds, decode seconds)
Timed: TypeAlias = Callable[[Sequence[list[int]], int], tuple[float, float]]


class ServedDecoder(TimedDecoder):
    """A decoder in its own process.

    In this process its worker threads, which spin for a while after each run, would slow down the other decoders, small
    models by a factor of two to three.
    """

    def __init__(self, name: str, load: Callable[..., Timed], *arguments: Any) -> None:
        """Start the process and wait until it has loaded the model. Raises ConfigError where that fails.

        Args:
            name: the name of the decoder.
            load: a module-level function that loads the model; called in the new process.
            arguments: the arguments of `load`.
        """
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, load, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            refusal = self._connection.recv()
        except EOFError as error:
            raise ConfigError(f"{name} stopped while loading the model: see its output above") from error
        if refusal is not None:
            raise ConfigError(refusal)

    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        self._connection.send((ids.tolist(), new_tokens))
        prefill, decode = self._connection.recv()
        time.sleep(_SETTLE)
        return prefill, decode


def _serve(connection: Connection, load: Callable[..., Timed], arguments: tuple[Any, ...]) -> None:
    """Time each (prompts, new tokens) received on the connection, until it is closed."""
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
    """A tokenizer with the words t0, t1, …, since CTranslate2 takes prompts as words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{n}": n for n in range(size)}, unk_token="t3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t3", bos_token="t2", eos_token="t2", pad_token="t1"
    )


class LlamaCpp(ServedDecoder):
    """The same weights in llama.cpp, on CPU, quantized as `Q8_0` or `Q4_0`: 32 inputs share a scale.

    Raises ConfigError where it isn't installed, or the model isn't a Llama.
    """

    def __init__(self, model: PreTrainedModel, quantization: str) -> None:
        if model.config.model_type != "llama":
            raise ConfigError(f"--peers llama.cpp supports Llama models only: this model is {model.config.model_type}")
        _check_installed("llama-cpp", "llama_cpp", "gguf")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.gguf")
            write_gguf(model, path, quantization)
            super().__init__(f"llama.cpp {quantization}", _load_llama_cpp, path, torch.get_num_threads())


def _check_installed(extra: str, *packages: str) -> None:
    """Raise ConfigError for a missing package, without importing any into this process."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed: pip install 'skipdecode[{extra}]'")


def _load_llama_cpp(path: Path, threads: int) -> Timed:
    llama = GreedyLlama(path, threads)

    def timed(ids: Sequence[list[int]], new_tokens: int) -> tuple[float, float]:
        continued = llama.run(ids, new_tokens)
        return continued.prefill_seconds, continued.decode_seconds

    return timed
