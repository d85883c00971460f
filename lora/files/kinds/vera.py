"""VeRA (Kopiczko et al. 2023, arXiv:2310.11454): its tensors, seen as those of LoRA with rank rows of their own.

    base_model.vera_A           [r, widest in]     shared by all modules, random and frozen
    base_model.vera_B           [widest out, r]
    ….q_proj.vera_lambda_d      [r]                lora_A.weight [r, in]  = diag(d) vera_A[:, :in]
    ….q_proj.vera_lambda_b      [out]              lora_B.weight [out, r] = diag(b) vera_B[:out]

The delta is b * (vera_B[:out] (d * (vera_A[:, :in] x))), without a scale. Other tensors keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...step_yield import yield_to_steps
from ..errors import adapter_error
from ..tensor_file import TensorFile
from ..tensor_keys import ModuleShape, find_module, unwrapped
from .base import TRAINING, AdapterKind, FieldRule, read_floats
from .lora import FIELDS

_OWN: dict[str, FieldRule] = {
    "r": FIELDS["r"],
    "save_projection": FieldRule(
        "`true`: the file has `vera_A` and `vera_B`",
        "`false`: save the adapter with save_projection=True",
        lambda value: value is not None and value is not True,
    ),
    "projection_prng_key": FieldRule("any value; only needed without `save_projection`"),
    "bias": FieldRule(
        "`none`, `all`, `vera_only`: biases of linear projections",
        "other values",
        lambda value: value not in (None, "none", "all", "vera_only"),
        refused_on="experts",
    ),
    "vera_dropout": FieldRule(TRAINING),
    "d_initial": FieldRule(TRAINING),
    "init_weights": FieldRule(TRAINING),
}
_SHARED_FIELDS = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "fan_in_fan_out",
)

VERA_A, VERA_B = "vera_A", "vera_B"
_SHARED = re.compile(r"^(?P<part>vera_[AB])(?:\.[^.]+)?$")
_VECTOR = re.compile(r"^(?P<module>.+)\.vera_lambda_(?P<part>[bd])(?:\.[^.]+)?$")


def _as_lora(config: dict[str, Any]) -> dict[str, Any]:
    """Return LoRA's fields; the scale is 1."""
    bias = "lora_only" if config.get("bias") == "vera_only" else config.get("bias")
    return {"r": config.get("r"), "lora_alpha": config.get("r"), "bias": bias}


def _tensors(file: TensorFile, known: Mapping[str, ModuleShape]) -> TensorFile:
    """View a VeRA file's tensors under LoRA's names, for a model with `known` modules. Nothing is read yet.

    Raises:
        AdapterError: the file has no vera_A or vera_B, as without save_projection, tensors of LoRA, two tensors for one
            weight, or vectors that do not fit vera_A and vera_B.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    keys: dict[tuple[str, str], str] = {}  # by module, "" for the shared matrices, and part
    for key, shape in file.shapes.items():
        match = _SHARED.match(unwrapped(key)) or _VECTOR.match(key)
        if match is None and ".lora_" in key:
            raise adapter_error(f"{key[:200]} is a tensor of LoRA; the configuration has peft_type='VERA'")
        if match is None:
            shapes[key] = shape
            continue
        weight = match.groupdict().get("module", ""), match["part"]
        if weight in keys:
            raise adapter_error(f"two tensors for the same weight: {keys[weight][:200]} and {key[:200]}")
        keys[weight] = key
    for name in (VERA_A, VERA_B):
        if ("", name) not in keys:
            raise adapter_error(f"{name} is missing: a VeRA adapter is served only with save_projection=True")
    view = _View(file, shapes, keys.pop(("", VERA_A)), keys.pop(("", VERA_B)))
    for (module, part), key in keys.items():
        if part == "b":
            view.add_b(f"{module}.lora_B.weight", key)
            continue
        found = find_module(module, known)
        # The module may be unknown, which is an error later.
        view.add_a(f"{module}.lora_A.weight", key, None if found is None else found.shape.in_features)
        yield_to_steps()
    return TensorFile(view.shapes, view.read)


class _View:
    """Tensors of a file, and lora_A and lora_B of its modules, computed when they are read."""

    def __init__(self, file: TensorFile, shapes: dict[str, tuple[int, ...]], key_a: str, key_b: str) -> None:
        """`shapes`: of the file's other tensors. `key_a`, `key_b`: vera_A and vera_B."""
        a, b = file.shapes[key_a], file.shapes[key_b]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise adapter_error(f"vera_A and vera_B must be [r, in] and [out, r], got {list(a)} and {list(b)}")
        self.shapes = shapes
        self._file = file
        self._a, self._b = a, b
        self._keys = {VERA_A: key_a, VERA_B: key_b}
        self._kept: dict[str, Tensor] = {}
        self._products: dict[str, Callable[[], Tensor]] = {}

    def add_a(self, name: str, key: str, in_features: int | None) -> None:
        """Add diag(d) vera_A[:, :in] of a vector d; `in_features` None: as wide as vera_A."""
        shape, (rank, widest) = self._file.shapes[key], self._a
        size = widest if in_features is None else in_features
        if shape != (rank,) or size > widest:
            raise adapter_error(f"{key[:200]} {list(shape)} for {size} inputs does not fit vera_A {list(self._a)}")
        self.shapes[name] = rank, size
        self._products[name] = lambda: read_floats(self._file, key)[:, None] * self._shared(VERA_A)[:, :size]

    def add_b(self, name: str, key: str) -> None:
        """Add diag(b) vera_B[:out] of a vector b."""
        shape, (widest, rank) = self._file.shapes[key], self._b
        if len(shape) != 1 or shape[0] > widest:
            raise adapter_error(f"{key[:200]} {list(shape)} does not fit vera_B {list(self._b)}")
        self.shapes[name] = shape[0], rank
        self._products[name] = lambda: read_floats(self._file, key)[:, None] * self._shared(VERA_B)[: shape[0]]

    def read(self, key: str) -> Tensor:
        """Read or compute a tensor of the view."""
        product = self._products.get(key)
        return self._file.read(key) if product is None else product()

    def _shared(self, part: str) -> Tensor:
        """Return vera_A or vera_B, which is read once."""
        if part not in self._kept:
            self._kept[part] = read_floats(self._file, self._keys[part])
        return self._kept[part]


VERA = AdapterKind(peft_type="VERA", own_fields=_OWN, shared_fields=_SHARED_FIELDS, as_lora=_as_lora, tensors=_tensors)
