"""The compiled CPU kernels (`cpu.cpp`), which run all layers of a step in one call.

Between two matrix products of a step, calling torch's operators costs more than their computation. The kernels avoid
these calls and read memory once. They are built with the package where there is a compiler; without them steps use
torch's operators. They compute what `skipdecode.fastpath.layer` does, with float32 between the matrix products.

The fields of the structs have the names and the order of those in `cpu.cpp`.
"""

import ctypes
import functools
import importlib.util
import math
import os
import warnings
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from skipdecode.errors import unknown

# The environment variable that names one of the instruction sets with kernels, or "none".
CHOICE = "SKIPDECODE_KERNELS"
GROUP = 32  # inputs that share a scale in 4-bit weights
MAX_HEAD_DIM = 512
KINDS = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3}


class LinearStruct(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("kind", c_int32),
    )


class NormStruct(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32))


class BlockStruct(Structure):
    _fields_ = (
        *((name, NormStruct) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("qkv", LinearStruct * 3),
        *((name, LinearStruct) for name in ("out", "gate", "up", "down")),
        *(
            (name, c_int32)
            for name in (
                "projections",
                "heads",
                "kv_heads",
                "head_dim",
                "interleaved",
                "window",
                "activation",
                "parallel",
                "norm_first",
            )
        ),
        ("scaling", c_float),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("block", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
    )


class StepStruct(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("running", c_void_p),
        ("final_norm", c_void_p),
        ("head", c_void_p),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("embedding", c_void_p),
        ("positions", c_void_p),
        ("token_ids", c_void_p),
        ("position_ids", c_void_p),
        ("token_count", c_int64),
        ("position_count", c_int64),
        ("row", c_void_p),
        ("column", c_void_p),
        ("last", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("bias", c_void_p),
        ("bias_row_stride", c_int64),
        ("bias_head_stride", c_int64),
        ("stop", c_int64),
        ("layer_tokens", c_void_p),
        ("layer_rows", c_void_p),
        *(
            (name, c_int32)
            for name in (
                "layer_count",
                "tokens",
                "hidden_size",
                "threads",
                "cache_type",
                "one_token_a_row",
                "rotated",
                "rotary_stride",
                "last_count",
            )
        ),
    )


class GreedyStruct(Structure):
    _fields_ = (
        ("running", c_void_p),
        ("layer_counts", c_void_p),
        ("position_ids", c_void_p),
        ("rotary_token", c_int64),
        *((name, c_void_p) for name in ("ends", "most", "chosen", "counts")),
        *((name, c_int32) for name in ("steps", "end_count")),
    )


class DraftsStruct(Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "layers",
                "head",
                "all_running",
                "worth",
                "bounds",
                "shares",
                "probabilities",
                "drafted",
                "agreed",
            )
        ),
        *((name, c_int32) for name in ("all_count", "kinds", "rounds")),
    )


class Kernels:
    """The compiled functions, for one instruction set."""

    def __init__(self, library: ctypes.CDLL, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.step: Any = library.skipdecode_step
        self.step.argtypes = (c_int32, POINTER(StepStruct))
        self.step.restype = c_int32
        self.greedy: Any = library.skipdecode_greedy
        self.greedy.argtypes = (c_int32, POINTER(StepStruct), POINTER(GreedyStruct))
        self.greedy.restype = c_int32
        self.lossless: Any = library.skipdecode_lossless
        self.lossless.argtypes = (c_int32, POINTER(StepStruct), POINTER(GreedyStruct), POINTER(DraftsStruct))
        self.lossless.restype = c_int32
        self.linear: Any = library.skipdecode_linear
        self.linear.argtypes = (c_int32, POINTER(LinearStruct), c_void_p, c_int32, c_int32, c_void_p)
        self.linear.restype = None
        self.pack: Any = library.skipdecode_pack
        self.pack.argtypes = (c_int32, POINTER(LinearStruct), c_void_p, c_int32, c_int32)
        self.pack.restype = None


@functools.cache
def kernels() -> Kernels | None:
    """The kernels for this processor; None where none were built, or SKIPDECODE_KERNELS=none.

    Raises ConfigError where SKIPDECODE_KERNELS names an instruction set that the processor or the build doesn't have.
    """
    path = _built()
    chosen = os.environ.get(CHOICE)
    if path is None or chosen == "none":
        return None
    try:
        library = ctypes.CDLL(path)
        block, step, *rest = map(ctypes.sizeof, (BlockStruct, StepStruct, GreedyStruct, DraftsStruct))
        known = library.skipdecode_layout() == (block * 1000 + step) * 1000 + sum(rest)
        known = known and library.skipdecode_pack is not None
    except (OSError, AttributeError) as error:
        reason = str(error)
    else:
        reason = "" if known else "it was built from another version of its sources"
    if reason:
        warnings.warn(
            f"decoding without the compiled kernels in {path}: {reason}; install skipdecode again", stacklevel=2
        )
        return None
    library.skipdecode_set_name.restype = c_char_p
    usable = {
        library.skipdecode_set_name(n).decode(): n
        for n in range(library.skipdecode_sets())
        if library.skipdecode_has_set(n)
    }
    if chosen is not None and chosen not in usable:
        raise unknown(CHOICE, chosen, [*usable, "none"])
    name = chosen if chosen is not None else next(iter(usable))
    return Kernels(library, usable[name], name)


def _built() -> str | None:
    """The path of the compiled kernels; None where they weren't built."""
    try:
        found = importlib.util.find_spec("skipdecode.kernels._cpu")
    except ModuleNotFoundError:  # a checkpoint's own copy of this file, without the package
        return None
    return found.origin if found is not None else None


class NativeLinear:
    """A projection by the kernels, with weights in float32, bfloat16, 8 or 4 bits.

    float32 weights are copied in blocks; contiguous bfloat16 weights are read in place. In 8 bits each output has a
    scale, in 4 bits each group of 32 inputs of an output. With these, each row of inputs is rounded to 8 bits with a
    scale of its own, so that a row gives the same result in any batch.

    Args:
        weight: [out, in], on CPU; float32 or bfloat16 where `kind` is None.
        kind: "int8" or "int4"; None for the type of `weight`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: str | None = None) -> None:
        outputs, inputs = weight.shape
        weight = weight.detach().contiguous()
        if kind is not None and weight.dtype not in KINDS:
            weight = weight.float()
        self._scale: torch.Tensor | None = None
        blocks = math.ceil(outputs / 16)
        if kind == "int8":  # 0 is stored as 128; blocks of 16 outputs by 4 inputs
            self._weight = torch.empty(blocks, math.ceil(inputs / 64) * 16, 16, 4, dtype=torch.uint8)
            self._scale = torch.empty(blocks * 16, dtype=torch.float32)
        elif (
            kind == "int4"
        ):  # 0 is stored as 8; 64 bytes hold two blocks of 16 outputs by 4 inputs, the first in low nibbles
            groups = math.ceil(inputs / GROUP)
            self._weight = torch.empty(blocks, groups, GROUP // 8, 16, 4, dtype=torch.uint8)
            self._scale = torch.empty(blocks, groups, 16, dtype=torch.bfloat16)
        else:
            packed = weight.dtype == torch.float32
            self._weight = torch.empty(blocks, inputs, 16, dtype=torch.float32) if packed else weight
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.struct = LinearStruct(
            self._weight.data_ptr(),
            address(self._scale),
            address(self._bias),
            inputs,
            outputs,
            KINDS[kind or weight.dtype],
        )
        if self._weight is not weight:
            compiled = kernels()
            assert compiled is not None
            threads, type_ = torch.get_num_threads(), KINDS[weight.dtype]
            compiled.pack(compiled.number, self.struct, weight.data_ptr(), type_, threads)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out], in the type of `hidden`."""
        exact = hidden.float().contiguous()
        found = torch.empty(len(exact), self.struct.outputs, dtype=torch.float32)
        compiled = kernels()
        assert compiled is not None
        compiled.linear(
            compiled.number, self.struct, exact.data_ptr(), len(exact), torch.get_num_threads(), found.data_ptr()
        )
        return found.to(hidden.dtype)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
