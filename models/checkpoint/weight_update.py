"""New weights for a model in use: all are checked before any is changed, then each layer is replaced in place.

    file --stored_tensors--> tensors by slot --load_into--> layer of a second model --copy_weights--> layer in use

The second model has the same config and no weights but those of the layer that is being replaced, so memory has one
layer twice. Packing and rounding are those of a start: the model then computes, bit for bit, what one computes that was
started on the new files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...platform.core.errors import InvalidRequestError, NotFoundError, OutriderError, UnsupportedModelError, invalid
from ...platform.core.sampling_params import quote_for_error
from ..decoder import Decoder
from ..layers.weights import WeightSlot
from ..model import LanguageModel, ModelConfig
from ..weight_copy import copy_weights
from .gguf_file import is_gguf
from .json_files import read_model_config
from .loader import ModelOptions, build_unfilled, names_of, served_config, stored_tensors, use_renamed
from .weight_files import StoredTensor, load_into

PARAM = "path"
"""Field of a request that errors name."""
_DERIVED = ("batch_invariant", "raw", "quantization")
"""Fields of a config that no new config.json has to agree with; quantisation is compared by its name."""
_LAYER = re.compile(r"(.*?(?:^|\.)(?:layers|h)\.(\d+))\.")


class WeightUpdate:
    """Checked weights for a model in use."""

    def __init__(self, model: LanguageModel, base: Path, sources: Sequence[Path], options: ModelOptions) -> None:
        """Read and check them; `model` does not change.

        Args:
            model: the model in use.
            base: its folder or file, whose config.json stands for that of a source without one.
            sources: folders, GGUF files or safetensors files, whose tensors are taken together.
            options: those that the model was loaded with.

        Raises:
            InvalidRequestError: the config, a tensor's name, shape or dtype is not the model's, a tensor cannot be read
                or has numbers that are not finite, or a layer is not whole; the message names it.
            NotFoundError: files are missing.
        """
        if not isinstance(model, Decoder):
            raise invalid(
                PARAM, "cannot be loaded: weights of a model in transformers' code are not replaced while it runs"
            )
        self._model, self._config, self._is_share = model, model.whole_config, options.ranks is not None
        fresh = build_unfilled(self._config, model.device, options, single_copy=model.embedding.single_copy)
        assert isinstance(fresh, Decoder), "the config is the same"
        self._parts = fresh.weight_parts()
        self._slots: dict[str, WeightSlot] = fresh.weight_slots()
        self._tensors: dict[str, StoredTensor] = {}
        with _errors_name_the_path():
            for source in sources:
                self._tensors |= self._read(source, base, fresh, options)
        self._units = _units(self._tensors, set(self._slots))
        self.is_whole = self._tensors.keys() == self._slots.keys()
        """True when all weights are replaced."""
        for name, tensor in self._tensors.items():
            check = WeightSlot(tensor.shape, partial(_check_finite, name), load_quantized=_accept)
            load_into(check, name, tensor, PARAM)

    def _read(self, source: Path, base: Path, fresh: LanguageModel, options: ModelOptions) -> dict[str, StoredTensor]:
        has_config, served = source.is_dir() or is_gguf(source), self._config
        raw = read_model_config(source if has_config else base)
        found = served_config(raw, served.dtype, options, source, batch_invariant=served.batch_invariant)
        _check_config(source, found, served)
        return stored_tensors(source, self._slots, fresh, served, names_of(raw), partial=not has_config)

    @torch.inference_mode()
    def apply(self) -> None:
        """Replace the weights, once. After an error the model has weights of both, and must not be used."""
        parts, in_use = self._parts, self._model.weight_parts()
        for unit, names in self._units.items():
            for name in names:
                load_into(self._slots.pop(name), name, self._tensors[name], PARAM)
            found = _LAYER.fullmatch(f"{unit}.")
            if found is not None:
                copy_weights(parts[int(found[2])], in_use[int(found[2])])
                parts[int(found[2])] = None
        for part, other in zip(parts, in_use, strict=True):
            if part is not None:
                copy_weights(part, other)
        if self._is_share:
            self._remember()
        self._model.weights_changed()

    def _remember(self) -> None:
        """Let the model read the new files when an adapter needs whole weights, of which it has shares."""
        slots = self._model.weight_slots()
        use_renamed(slots, dict(self._tensors), self._model.renamed_slots())
        for name, tensor in self._tensors.items():
            if name in slots and (remember := slots[name].remember) is not None:
                remember(tensor.read)


@contextmanager
def _errors_name_the_path() -> Iterator[None]:
    """Let the errors of files name the field of the request."""
    try:
        yield
    except (InvalidRequestError, NotFoundError, UnsupportedModelError) as error:
        kind: type[OutriderError] = NotFoundError if isinstance(error, NotFoundError) else InvalidRequestError
        raise kind(error.message, param=PARAM) from error


def _check_config(source: Path, found: ModelConfig, served: ModelConfig) -> None:
    """Refuse a model of another config than the one that is served."""
    facts: list[tuple[str, Any, Any]] = [
        ("architecture", found.architecture, served.architecture),
        (
            "quantization",
            found.quantization and found.quantization.name,
            served.quantization and served.quantization.name,
        ),
    ]
    if type(found) is type(served):
        names = [field.name for field in dataclasses.fields(served) if field.name not in _DERIVED]
        facts += [(name, getattr(found, name), getattr(served, name)) for name in names]
    for name, new, old in facts:
        if new != old:
            raise invalid(
                PARAM,
                f"{source} is of another model: its {name} is {quote_for_error(new)}, that of the served model is "
                f"{quote_for_error(old)}",
            )


def _units(tensors: dict[str, StoredTensor], slots: set[str]) -> dict[str, list[str]]:
    """Tensors by the layer, or else by the module, that they belong to: these are replaced as a whole.

    Raises:
        InvalidRequestError: a layer or module is not complete.
    """
    needed: dict[str, list[str]] = {}
    for name in slots:
        found = _LAYER.match(name)
        needed.setdefault(found[1] if found else name.rpartition(".")[0], []).append(name)
    units = {unit: names for unit, names in needed.items() if any(name in tensors for name in names)}
    for unit, names in units.items():
        if missing := sorted(name for name in names if name not in tensors):
            raise invalid(PARAM, f"lacks {missing[0]}: a partial update has all tensors of a layer, here of {unit}")
    return units


def _accept(weight: object) -> None:
    """Take a quantised weight, whose reader has checked its numbers."""


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise invalid(PARAM, f"the tensor {name} has numbers that are not finite")
