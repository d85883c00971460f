"""Format of compressed-tensors, which llm-compressor writes: integers of 4 and 8 bits, and float8.

pack-quantized   weight_packed int32 [O, I · bits / 32], weight_shape [2], weight_scale [O, G], maybe weight_zero_point
                 int32 [O · bits / 32, G] and weight_g_idx [I]
int-quantized    weight int8 [O, I], weight_scale [1], [O, 1] or [O, G], maybe weight_zero_point of that shape
float-quantized  weight float8 [O, I], weight_scale of a tensor, rows or blocks

Inputs are rounded to int8 if the config says so for an int8 weight with one scale for each row (W8A8), with a scale
of their own for each token, even if the file has fixed ones. Inputs of float8 weights are rounded as `fp8.py` says.
All other inputs stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ...kernels.quantized_linear import QuantizedWeight
from ..checkpoint.weight_files import StoredTensor
from . import fp8
from .base import Format, Grouped, Parts, choice, group_size, num_groups, unpack_codes, unsupported

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PARTS = (
    *("weight_scale", "weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("input_scale", "input_zero_point"),
)


class _Scheme(NamedTuple):
    """Form of the weights of some modules."""

    targets: tuple[str, ...]
    """Names of modules, regular expressions after "re:", or classes."""
    bits: int
    is_float: bool
    group: int
    """Inputs that share a scale; -1: all."""
    block: tuple[int, int] | None
    rounds_inputs: bool
    """True: inputs are rounded to the weight's type."""
    has_input_scale: bool
    """True: the file has the scale of inputs."""

    def match(self, module: str) -> tuple[int, str] | None:
        """Rank of the target that is nearest to a module: its name, an expression, its class; None: none is it."""
        ranks = [
            (1, target) if target.startswith("re:") else (0 if target == module else 2, target)
            for target in self.targets
            if target in (module, "Linear") or (target.startswith("re:") and re.match(target[3:], module))
        ]
        return min(ranks, default=None)


def parse(values: Mapping[str, Any]) -> Format:
    """Format that a quantization_config describes.

    Raises:
        UnsupportedModelError: an option is not served; `param` names it.
    """
    choice(values, "quantization_status", ("compressed",), "compressed")
    whole = choice(values, "format", (*_FORMATS, "mixed-precision"), None)
    sparsity = values.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise unsupported("sparsity_config", sparsity["format"], "dense")
    if values.get("transform_config"):
        raise unsupported("transform_config", values["transform_config"], "none")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise unsupported("config_groups", groups, "an object of schemes")
    schemes = [_scheme(f"config_groups.{name}", group, whole) for name, group in groups.items()]

    def describe(parts: Parts) -> StoredTensor:
        ranked = [(rank, scheme) for scheme in schemes if (rank := scheme.match(parts.module)) is not None]
        if not ranked and len(schemes) > 1:
            raise ValueError("no group of the config_groups has it as a target")
        # Without a rank the only scheme is that of a class such as Embedding.
        scheme = min(ranked, key=itemgetter(0))[1] if ranked else schemes[0]
        if scheme.is_float:
            return fp8.describe(
                parts, scheme.block, rounds_inputs=scheme.rounds_inputs, is_static=scheme.has_input_scale
            )
        return _packed(parts, scheme) if "weight_packed" in parts else _plain(parts, scheme)

    kinds = sorted({"float8" if s.is_float else f"W{s.bits}A{8 if s.rounds_inputs else 16}" for s in schemes})
    return Format("compressed-tensors", f"compressed-tensors {', '.join(kinds)}", _PARTS, describe)


def _scheme(field: str, group: object, whole: str) -> _Scheme:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise unsupported(field, group, "a scheme with weights")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise unsupported(f"{field}.targets", targets, "a list of names")
    try:
        for target in targets:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error:
        raise unsupported(f"{field}.targets", targets, "regular expressions after re:") from None
    choice({field: group.get("format") or whole}, field, (*_FORMATS, "mixed-precision"), None)
    weights = {f"{field}.weights.{name}": value for name, value in group["weights"].items()}
    option = f"{field}.weights."
    kind = choice(weights, f"{option}type", ("int", "float"), "int")
    bits = choice(weights, f"{option}num_bits", (8,) if kind == "float" else (4, 8), 8)
    strategy = choice(weights, f"{option}strategy", ("tensor", "channel", "group", "block"), "tensor")
    choice(weights, f"{option}actorder", (None, "group", "weight", "static", "dynamic"), None)
    block = None
    if strategy == "block":
        block = fp8.block_size(weights.get(f"{option}block_structure"), f"{option}block_structure")
    if (strategy == "block") != (block is not None) or (strategy == "block" and kind == "int"):
        raise unsupported(f"{option}strategy", strategy, "blocks of float8 with a block_structure")
    activations = group.get("input_activations")
    inputs: Mapping[str, Any] = activations if isinstance(activations, Mapping) else {}
    rounds = inputs is activations and bits == 8 and inputs.get("type", "int") == kind
    if rounds and kind == "float":  # not with scales for parts of a token, which are finer
        rounds = inputs.get("num_bits", 8) == 8 and inputs.get("strategy", "token") in ("token", "tensor", None)
    has_scale = rounds and inputs.get("dynamic", False) is False
    if rounds and kind == "int":
        option_of_inputs = f"{field}.input_activations.num_bits"
        choice({option_of_inputs: inputs.get("num_bits", 8)}, option_of_inputs, (8,), 8)
    size = group_size(weights, f"{option}group_size", -1) if strategy == "group" else -1
    return _Scheme(tuple(targets), bits, kind == "float", size, block, rounds and strategy != "group", has_scale)


def _packed(parts: Parts, scheme: _Scheme) -> StoredTensor:
    parts.check("weight_shape", (2,))
    outputs, inputs = (int(size) for size in parts.read("weight_shape", torch.int64, torch.int32))
    bits = scheme.bits
    parts.check("weight_packed", (outputs, -(-inputs * bits // 32)))
    group, groups = num_groups(inputs, scheme.group)
    parts.check("weight_scale", (outputs, groups), *([(1,), ()] if groups == 1 else []))
    if "weight_zero_point" in parts:
        parts.check("weight_zero_point", (-(-outputs * bits // 32), groups))
    if "weight_g_idx" in parts:
        parts.check("weight_g_idx", (inputs,))

    def read() -> Any:
        codes = unpack_codes(parts.read("weight_packed", torch.int32), bits, inputs)
        scales = parts.floats("weight_scale")
        if groups == 1:
            scales = fp8.channel_scales(scales, outputs)
        zeros = index = None
        if "weight_zero_point" in parts:
            zeros = unpack_codes(parts.read("weight_zero_point", torch.int32).t(), bits, outputs).t().contiguous()
        if "weight_g_idx" in parts:
            index = parts.read("weight_g_idx", torch.int32, torch.int64)
        return Grouped(bits, codes, scales, group, zeros, index).weight()

    return StoredTensor((outputs, inputs), read)


def _plain(parts: Parts, scheme: _Scheme) -> StoredTensor:
    outputs, inputs = parts.shape("weight", 2)
    group, groups = num_groups(inputs, scheme.group)
    shape = parts.check("weight_scale", (outputs, groups), *([(1,), (), (outputs,)] if groups == 1 else []))
    if "weight_zero_point" in parts:
        parts.check("weight_zero_point", shape)

    def read() -> Any:
        scales = parts.floats("weight_scale")
        offsets = None
        if "weight_zero_point" in parts:
            zeros = parts.read("weight_zero_point", torch.int8, torch.int32, torch.float32, torch.bfloat16)
            offsets = -zeros.float() * scales if zeros.any() else None
        if groups == 1:
            scales = fp8.channel_scales(scales, outputs)
            offsets = None if offsets is None else fp8.channel_scales(offsets, outputs)
        weight = QuantizedWeight(
            bits=8, codes=parts.read("weight", torch.int8), scales=scales, group=group, offsets=offsets
        )
        return replace(weight, input_bits=8) if scheme.rounds_inputs else weight

    return StoredTensor((outputs, inputs), read)
