"""Adapters on parameters that hold all experts (PEFT's `target_parameters`), seen as adapters of single experts.

    ….experts.lora_A.weight             [E · r, in]    rows e · r to e · r + r belong to expert e
    ….experts.lora_B.weight             [out, r · E]   columns e, e + E, e + 2 E... belong to expert e
    ….experts.base_layer.lora_A.weight                 of a second parameter, which PEFT wraps first

The shapes show whether the parameter is gate_up_proj or down_proj. The delta of expert e is B[:, e::E] A[e · r:].

Before PEFT 0.19 in and out were those of a parameter [E, in, out], although most models have [E, out, in]. Since then
they are those of [E, out, in] for some models that have [E, in, out] (Llama 4). A and B are those of the transposed
delta in both cases, which the shapes show. A square parameter is read as the file's others are; if these are square
too, one of an older PEFT is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..step_yield import yield_to_steps
from .errors import adapter_error
from .tensor_file import TensorFile
from .tensor_keys import ModuleShape, possible_names, unwrapped

_KEY = re.compile(r"^(?P<module>.+\.experts)(?:\.base_layer)*\.lora_A(?P<rest>(?:\.[^.]+)?\.weight)$")
_TRANSPOSES = (0, 19)
"""First version of PEFT that knows which parameters are [E, out, in]."""
_CACHED = 4
"""Tensors that are kept while they are read: A and B of both parameters of a layer."""


def split_parameters(
    file: TensorFile, known: Mapping[str, ModuleShape], version: tuple[int, ...]
) -> tuple[TensorFile, dict[str, str]]:
    """View a file's parameters of all experts, written by this version of PEFT, as modules of single experts.

    Returns:
        The view, or the file itself when it has no such parameters; and by module the name of its parameter, which the
        patterns of adapter_config.json match.

    Raises:
        AdapterError: the model has no experts there, or the shapes fit none of their parameters, or one that an older
            PEFT may have written transposed.
    """
    found = [match for key in file.shapes if (match := _KEY.match(key))]
    if not found:
        return file, {}
    view = _View(file)
    holders = _holders(known)
    fits: dict[tuple[str, str], tuple[_Fit | None, str]] = {}
    for match in found:
        configured = unwrapped(match["module"])
        holder = next((holders[name] for name in possible_names(configured) if name in holders), None)
        b = f"{match[0].removesuffix('lora_A' + match['rest'])}lora_B{match['rest']}"
        shapes = file.shapes[match[0]], file.shapes.get(b, ())
        if holder is None or len(shapes[0]) != 2 or len(shapes[1]) != 2:
            raise adapter_error(f"base mismatch: the served model has no experts for {match[0]} {list(shapes[0])}")
        fits[match[0], b] = _fit(holder, known, (shapes[0][1], shapes[1][0])), configured
        yield_to_steps()
    turned = any(fit is not None and fit.is_turned for fit, _ in fits.values())
    for keys, (fit, configured) in fits.items():
        if fit is None:
            a, b = keys
            raise adapter_error(
                f"base mismatch: {a} {list(file.shapes[a])} and {b} {list(file.shapes[b])} fit no parameter of the "
                "experts"
            )
        if fit.is_square and not turned and version < _TRANSPOSES:
            raise adapter_error(
                f"{keys[0]}: PEFT before 0.19 wrote experts' square parameters transposed; save the adapter "
                "again with a newer one (peft_version in adapter_config.json)"
            )
        view.add(keys, fit, f"{configured}.{fit.parameter}", turned=turned and (fit.is_turned or fit.is_square))
    return TensorFile(view.shapes, view.read), view.configured


class _Fit(NamedTuple):
    """Parameter of a model's experts that A and B fit."""

    parameter: str
    projections: list[list[str]]
    """Names of each projection in the parameter, expert by expert."""
    sizes: list[int]
    """Outputs of each projection."""
    is_turned: bool
    """True: they fit the transposed delta."""
    is_square: bool
    """True: they fit either. One merged projection is that of a model with [E, in, out], for every PEFT."""


def _fit(holder: Mapping[str, list[str]], known: Mapping[str, ModuleShape], given: tuple[int, int]) -> _Fit | None:
    """Parameter with the inputs and outputs `given`, in this order or turned."""
    *gate_up, last = holder.values()
    first = "gate_up_proj" if len(gate_up) > 1 else next(iter(holder))
    has_gate = first == "gate_up_proj"
    parameters = []
    for parameter, projections in ((first, gate_up), ("down_proj", [last])):
        sizes = [known[names[0]].out_features for names in projections]
        parameters.append((parameter, projections, sizes, (known[projections[0][0]].in_features, sum(sizes))))
    for turned in (False, True) if has_gate else (False,):  # without gates either parameter fits the other one turned
        for parameter, projections, sizes, inner in parameters:
            if given == (inner[::-1] if turned else inner):
                return _Fit(parameter, projections, sizes, turned, given[0] == given[1] and len(gate_up) > 1)
    return None


def _holders(known: Mapping[str, ModuleShape]) -> dict[str, dict[str, list[str]]]:
    """Modules of experts in the experts' order, by the module that holds them and by the projection: gate and up, or
    one of both, and down."""
    holders: dict[str, dict[str, list[str]]] = {}
    for name in known:
        holder, _, rest = name.rpartition(".experts.")
        if holder:
            holders.setdefault(f"{holder}.experts", {}).setdefault(rest.partition(".")[2], []).append(name)
    return holders


class _View:
    """Tensors of a file, some of them divided."""

    def __init__(self, file: TensorFile) -> None:
        self.shapes = dict(file.shapes)
        self.configured: dict[str, str] = {}
        self._file = file
        self._parts: dict[str, Callable[[], Tensor]] = {}
        self._kept: dict[str, Tensor] = {}

    def add(self, keys: tuple[str, str], fit: _Fit, parameter: str, *, turned: bool) -> None:
        """Divide A and B of a parameter, or if they are `turned` the transposed B and A."""
        (rows, in_features), num_experts = self.shapes.pop(keys[0]), len(fit.projections[0])
        out_features, columns = self.shapes.pop(keys[1])
        if rows % num_experts or columns != rows:
            raise adapter_error(f"{keys[0]}: {rows} rows are no rank for each of {num_experts} experts, or not B's")
        rank, start = rows // num_experts, 0
        in_features = out_features if turned else in_features
        for names, size in zip(fit.projections, fit.sizes, strict=True):
            for expert, name in enumerate(names):
                a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
                if a in self.shapes:
                    raise adapter_error(f"two tensors for the same weight: {a} and {keys[0]}")
                self.shapes |= {a: (rank, in_features), b: (size, rank)}
                of_a = keys[0], slice(expert * rank, (expert + 1) * rank)
                of_b = keys[1], (slice(None), slice(expert, None, num_experts))
                first, second = (of_b, of_a) if turned else (of_a, of_b)
                outputs = slice(start, start + size)
                self._parts[a] = partial(self._slice, *first, rows=slice(None), turned=turned)
                self._parts[b] = partial(self._slice, *second, rows=outputs, turned=turned)
                self.configured[name] = parameter
            start += size

    def read(self, key: str) -> Tensor:
        """Read a tensor of the view."""
        part = self._parts.get(key)
        return self._file.read(key) if part is None else part()

    def _slice(self, key: str, index: Any, *, rows: slice, turned: bool) -> Tensor:
        """Some `rows` of a part of a tensor, which is transposed first if `turned`."""
        part = self._whole(key)[index]
        return (part.mT if turned else part)[rows].contiguous()

    def _whole(self, key: str) -> Tensor:
        if key not in self._kept:
            if len(self._kept) >= _CACHED:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._file.read(key)
        return self._kept[key]
