"""What is kept of a model between calls: its decoders with their copies of weights, schedules, and draft records."""

import math
import threading
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from skipdecode.errors import ConfigError, unknown
from skipdecode.families import decoder_layers, unwrap
from skipdecode.fastpath.cpu_steps import BFLOAT16_AS_FLOATS
from skipdecode.fastpath.model import FastDecoder
from skipdecode.fastpath.support import Fingerprint, Inspection, why_unsupported
from skipdecode.generate.draft_record import DraftRecord, LoopKind
from skipdecode.generate.solved_schedules import SolvedSchedules
from skipdecode.internals import has_bfloat16_on_cpu
from skipdecode.kernels.cpu import kernels
from skipdecode.kernels.linear import Weights
from skipdecode.kernels.on_gpu import HALF_PRECISION, kernels_on
from skipdecode.schedule.machine_profile import Profile
from skipdecode.schedule.schedule import SkipSchedule


class FastPath:
    """The fast path of one unwrapped model. It holds no reference to the model, so that this can be freed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._making = threading.Lock()  # if two threads ask for a decoder at once, one makes it
        self._look: Inspection | None = None
        self._origin: Fingerprint | None = None  # the parts that the decoders were made of
        self._decoders: dict[str, FastDecoder] = {}  # for each kind of weights, and for drafts
        self._records: dict[tuple[Weights, SkipSchedule, LoopKind], DraftRecord] = {}
        self._solved: SolvedSchedules | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model, which must still exist."""
        model = self._model()
        assert model is not None
        return model

    def look(self) -> Inspection:
        """The model's parts; examined again only if they have changed."""
        if self._look is None or not self._look.still_holds(self.model):
            self._look = Inspection(self.model)
        return self._look

    def why_not(self) -> str | None:
        """The reason why the model needs its own forward pass to decode; None if the fast path can."""
        return why_unsupported(self.model) or self.look().reason

    def decoder(self, weights: Weights | None = None, *, looked: bool = False) -> FastDecoder:
        """The model's FastDecoder: made on first use, and again after the model has changed.

        Changes are found by the modules and their settings, and by each parameter's address, version and 32 of its
        values (`skipdecode.fastpath.support.Fingerprint` says what this can't detect).

        Args:
            weights: as in FastDecoder; None for the usual ones.
            looked: whether `why_not` was just called, which examines the model too.

        Raises:
            ConfigError: for an unknown kind of weights, or one that the model's device or dtype doesn't support.
        """
        weights = self.usual_weights(available=True) if weights is None else weights
        self._check_weights(weights)
        with self._making:
            look = self._look if looked and self._look is not None else self.look()
            if self._origin is None or not self._origin.still_holds(look):
                self._decoders, self._records = {}, {}  # frees old copies before new ones are made
                self._origin = Fingerprint(look)
            if weights not in self._decoders:
                self._decoders[weights] = FastDecoder(self.model, weights)
                if weights != "model" and self.model.device.type == "cuda":
                    torch.cuda.empty_cache()  # free what rounding took, as caches get a share of the free memory
            return self._decoders[weights]

    def _check_weights(self, weights: Weights) -> None:
        if weights not in get_args(Weights):
            raise unknown("weights", str(weights), get_args(Weights))
        device, dtype = self.model.device, self.model.dtype
        if weights.startswith("int") and device.type == "cuda":
            if kernels_on(device) is None or dtype not in HALF_PRECISION:
                raise ConfigError(
                    f"weights={weights!r} on a GPU needs the Triton kernels, which run on NVIDIA GPUs of compute "
                    f"capability 8.0 or newer, and a model in bfloat16 or float16; this one is in {dtype} on {device}"
                )
            return
        if weights != "model" and (device.type != "cpu" or not torch.backends.mkldnn.is_available()):
            raise ConfigError(f"weights={weights!r} needs a CPU with oneDNN, and the model is on {device}")
        if weights == "packed" and dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"weights='packed' needs float32 or bfloat16, and the model is in {dtype}")
        if "int4" in weights and kernels() is None:
            raise ConfigError(
                f"weights={weights!r} needs the compiled kernels, which this installation lacks: reinstall skipdecode "
                "with a C++ compiler available, and leave SKIPDECODE_KERNELS unset"
            )

    def draft_decoder(self, decoder: FastDecoder, layers: Collection[int]) -> FastDecoder:
        """The decoder that runs `layers` for drafts that `decoder` verifies: 8-bit copies, as drafts may be inexact.

        It is `decoder` itself if copies wouldn't reduce what is read, if the kernels weren't built, if no copies are
        wanted, and if the copies don't fit in half of the free memory.
        """
        if decoder.draft_weights == decoder.weights:
            return decoder
        with self._making:
            held = self._decoders.get("drafts")
            if held is None or not held.runs(layers):
                modules: list[Any] = [decoder_layers(self.model)[n] for n in layers]
                modules.append(self.model.get_output_embeddings())
                if sum(p.numel() for module in modules for p in module.parameters()) > free_memory() / 2:
                    return decoder
                held = self._decoders["drafts"] = FastDecoder(self.model, "int8", layers, held)
            return held

    def usual_weights(self, *, available: bool | None = None) -> Weights:
        """The default kind of weights: "packed" on a CPU with oneDNN if the copies fit in half of the free memory, else
        "model". Bfloat16 also needs instructions for it, or compiled kernels for this processor.

        A model without a fast path (not `available`, if that is already known) has the kind "model".
        """
        model = self.model
        available = self.why_not() is None if available is None else available
        if not available or model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return "model"
        compiled = kernels()
        supports_bfloat16 = has_bfloat16_on_cpu() or (compiled is not None and compiled.name in BFLOAT16_AS_FLOATS)
        if not (supports_bfloat16 if model.dtype == torch.bfloat16 else model.dtype == torch.float32):
            return "model"
        if "packed" in self._decoders:
            return "packed"
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        return "packed" if needed < free_memory() / 2 else "model"

    def solved(self) -> SolvedSchedules:
        """The schedules that follow from the model's config; solved again if config, depth or dtype have changed."""
        if self._solved is None or not self._solved.still_holds(self.model):
            self._solved = SolvedSchedules(self.model)
        return self._solved

    def profile(self, weights: Weights | None = None) -> Profile | None:
        """The calibrated profile that the model's speedups are solved for; None if there is none."""
        solved, model = self.solved(), self.model
        if weights is None and not any(solved.profile(model, kind) for kind in ("packed", "model")):
            return None  # the usual weights aren't asked for: a model on the meta device has none
        return solved.profile(model, weights or self.usual_weights())

    def draft_record(
        self, weights: Weights, schedule: SkipSchedule, kind: LoopKind = "kernels", *, do_sample: bool
    ) -> DraftRecord:
        """The record of a schedule's drafts in earlier greedy calls with a loop of this kind.

        Sampling gets a new record, so that a seed gives the same tokens in every call; greedy output doesn't depend on
        the record.
        """
        return DraftRecord() if do_sample else self._records.setdefault((weights, schedule, kind), DraftRecord())


_FAST_PATHS: weakref.WeakKeyDictionary[nn.Module, FastPath] = weakref.WeakKeyDictionary()
_FINDING = threading.Lock()


def fast_path(model: nn.Module) -> FastPath:
    """The fast path of a (possibly wrapped) model. Raises ConfigError if there is no transformers model inside."""
    inner = unwrap(model)
    with _FINDING:
        found = _FAST_PATHS.get(inner)
        if found is None:
            found = _FAST_PATHS[inner] = FastPath(inner)
        return found


def free_memory() -> float:
    """Bytes that can be allocated without swapping, as Linux reports; infinite on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    free = [line for line in lines if line.startswith("MemAvailable:")]
    return int(free[0].split()[1]) * 1024 if free else math.inf
