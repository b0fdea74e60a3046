"""The fast path of a model: the copies of its weights that decode, and what calls have found out about it."""

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
from skipdecode.generate.draft_policy import DraftRecord, LoopKind
from skipdecode.generate.solved_schedules import SolvedSchedules
from skipdecode.internals import has_bfloat16_on_cpu
from skipdecode.kernels.cpu import kernels
from skipdecode.kernels.linear import Weights
from skipdecode.schedule.machine_profile import Profile
from skipdecode.schedule.schedule import SkipSchedule


class FastPath:
    """All that is kept of one model between calls. The model itself isn't held, so that it can be freed.

    Args:
        model: that decodes, without wrappers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._making = threading.Lock()  # of two threads that ask for a decoder at once, one makes it
        self._look: Inspection | None = None
        self._origin: Fingerprint | None = None  # of the decoders
        self._decoders: dict[str, FastDecoder] = {}  # for each kind of weights, and for drafts
        self._records: dict[tuple[Weights, SkipSchedule, LoopKind], DraftRecord] = {}
        self._solved: SolvedSchedules | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model. It must not have been freed."""
        model = self._model()
        assert model is not None
        return model

    # ---- the model's parts, and decoders made of them

    def look(self) -> Inspection:
        """What there is to be seen of the model's parts: as before, where nothing of them has changed."""
        if self._look is None or not self._look.still_holds(self.model):
            self._look = Inspection(self.model)
        return self._look

    def why_not(self) -> str | None:
        """The reason why the model's decode steps must go through its own forward pass; None where they needn't."""
        return why_unsupported(self.model) or self.look().reason

    def decoder(self, weights: Weights | None = None, *, looked: bool = False) -> FastDecoder:
        """The model's FastDecoder, made when it is first asked for and again when the model has changed.

        What is looked at: which modules there are and what their settings are, where each parameter lies, its version,
        and 32 of its values (`skipdecode.fastpath.support.Fingerprint` says what that can't see).

        Args:
            weights: as in FastDecoder; None for the usual ones.
            looked: whether `why_not` has just been asked, which looks at the parts too.

        Raises:
            ConfigError: for kinds of weights that don't exist, or not on the model's device or in its type.
        """
        weights = self.usual_weights(available=True) if weights is None else weights
        self._check_weights(weights)
        with self._making:
            look = self._look if looked and self._look is not None else self.look()
            if self._origin is None or not self._origin.still_holds(look):
                self._decoders, self._records = {}, {}  # copies there were are freed before others are made
                self._origin = Fingerprint(look)
            if weights not in self._decoders:
                self._decoders[weights] = FastDecoder(self.model, weights)
            return self._decoders[weights]

    def _check_weights(self, weights: Weights) -> None:
        if weights not in get_args(Weights):
            raise unknown("weights", str(weights), get_args(Weights))
        device, dtype = self.model.device, self.model.dtype
        if weights != "model" and (device.type != "cpu" or not torch.backends.mkldnn.is_available()):
            raise ConfigError(f"weights={weights!r} needs a CPU with oneDNN, and the model is on {device}")
        if weights == "packed" and dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"weights='packed' is for float32 and bfloat16, and the model is of {dtype}")
        if "int4" in weights and kernels() is None:
            raise ConfigError(
                f"weights={weights!r} needs the compiled kernels, which this installation has not: install skipdecode "
                "anew where there is a C++ compiler, and leave SKIPDECODE_KERNELS unset"
            )

    def draft_decoder(self, decoder: FastDecoder, layers: Collection[int]) -> FastDecoder:
        """What runs `layers` for drafts that `decoder` verifies: copies of these in 8 bits, as drafts may be inexact.

        It is `decoder` itself where that reads no more, where the kernels weren't built, where no copies are wanted,
        and where they don't fit in half of the memory that is free.
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
        """The weights that the model decodes with unless they are told: "packed" on a CPU with oneDNN where the copies
        fit in half of the memory that is free, else "model". Bfloat16 needs instructions of it or compiled kernels for
        this processor.

        Args:
            available: whether the model has a fast path, for who knows it; "model" where it hasn't.
        """
        model = self.model
        available = self.why_not() is None if available is None else available
        if not available or model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return "model"
        compiled = kernels()
        of_bfloat16 = has_bfloat16_on_cpu() or (compiled is not None and compiled.name in BFLOAT16_AS_FLOATS)
        if not (of_bfloat16 if model.dtype == torch.bfloat16 else model.dtype == torch.float32):
            return "model"
        if "packed" in self._decoders:
            return "packed"
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        return "packed" if needed < free_memory() / 2 else "model"

    # ---- schedules and drafts

    def solved(self) -> SolvedSchedules:
        """The schedules that follow from the model's config; those of another config, depth or type are forgotten."""
        if self._solved is None or not self._solved.still_holds(self.model):
            self._solved = SolvedSchedules(self.model)
        return self._solved

    def profile(self, weights: Weights | None = None) -> Profile | None:
        """The calibrated profile of this machine that the model's speedups are solved for; None where there is none."""
        return self.solved().profile(self.model, weights or self.usual_weights())

    def draft_record(
        self, weights: Weights, schedule: SkipSchedule, kind: LoopKind = "ahead", *, do_sample: bool
    ) -> DraftRecord:
        """What earlier calls have shown of a schedule's drafts in loops of a kind, for greedy decoding, whose tokens
        don't depend on it; for sampling a new record, so that a seed gives the same tokens in every call.
        """
        return DraftRecord() if do_sample else self._records.setdefault((weights, schedule, kind), DraftRecord())


_FAST_PATHS: weakref.WeakKeyDictionary[nn.Module, FastPath] = weakref.WeakKeyDictionary()
_FINDING = threading.Lock()


def fast_path(model: nn.Module) -> FastPath:
    """The fast path of a (possibly wrapped) model. Raises ConfigError where there is no transformers model inside."""
    inner = unwrap(model)
    with _FINDING:
        found = _FAST_PATHS.get(inner)
        if found is None:
            found = _FAST_PATHS[inner] = FastPath(inner)
        return found


def free_memory() -> float:
    """Bytes that can be allocated without swapping, as Linux says it; elsewhere as many as one likes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    free = [line for line in lines if line.startswith("MemAvailable:")]
    return int(free[0].split()[1]) * 1024 if free else math.inf
