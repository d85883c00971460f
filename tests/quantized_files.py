"""Checkpoints in the formats of quantised weights, with random codes, written by code of their own.

A function of CASES makes the tensors of one projection [O, I] and the dense weight that they stand for, as the
documentation of the format says.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Made = tuple[dict[str, np.ndarray | torch.Tensor], np.ndarray]
Writer = Callable[[int, int, np.random.Generator], Made]


def pack(codes: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """int32 [n, m · bits / 32] of codes [n, m]; place k of a word has the code order[k]."""
    count = 32 // bits
    codes = np.pad(codes.astype(np.uint64), ((0, 0), (0, -codes.shape[1] % count)))
    words = np.zeros((codes.shape[0], codes.shape[1] // count), np.uint64)
    for k in range(count):
        words |= codes[:, (order[k] if order else k) :: count] << np.uint64(bits * k)
    return words.astype(np.uint32).view(np.int32)


def _scales(outputs: int, groups: int, rng: np.random.Generator, step: float) -> np.ndarray:
    return (rng.uniform(0.5, 1.5, (outputs, groups)) * step).astype(np.float16)


def _dense(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    return (codes - zeros[:, group_of]) * scales.astype(np.float32)[:, group_of]


def awq(outputs: int, inputs: int, rng: np.random.Generator) -> Made:
    groups = inputs // GROUP
    codes, zeros = rng.integers(0, 16, (outputs, inputs)), rng.integers(0, 16, (outputs, groups))
    scales = _scales(outputs, groups, rng, 0.02)
    tensors = {"qweight": pack(codes.T, 4, _AWQ_ORDER), "qzeros": pack(zeros.T, 4, _AWQ_ORDER), "scales": scales.T}
    return tensors, _dense(codes, zeros, scales, np.arange(inputs) // GROUP)


def gptq(
    bits: int, *, version: int = 1, shuffled: bool = False, symmetric: bool = False, group: int = GROUP, least: int = 1
) -> Writer:
    """`least`: zero point. Version 1 stores it less one, a 0 therefore as all bits."""

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> Made:
        size = inputs if group == -1 else group
        groups = inputs // size
        codes = rng.integers(0, 1 << bits, (outputs, inputs))
        zeros = rng.integers(least, 1 << bits, (outputs, groups))
        if symmetric:
            zeros[:] = 1 << (bits - 1)
        scales = _scales(outputs, groups, rng, 0.3 / (1 << bits))
        group_of = np.arange(inputs) // size
        if shuffled:
            rng.shuffle(group_of)
        tensors = {
            "qweight": pack(codes, bits).T,
            "qzeros": pack(((zeros - (version == 1)) % (1 << bits)).T, bits),
            "scales": scales.T,
            "g_idx": group_of.astype(np.int32),
            "bias": np.zeros(outputs, np.float16),
        }
        return tensors, _dense(codes, zeros, scales, group_of)

    return make


def packed_integers(bits: int, *, symmetric: bool = True, shuffled: bool = False, group: int = GROUP) -> Writer:
    def make(outputs: int, inputs: int, rng: np.random.Generator) -> Made:
        size = inputs if group == -1 else group
        middle, groups = 1 << (bits - 1), inputs // size
        codes = rng.integers(-middle, middle, (outputs, inputs))
        zeros = rng.integers(-middle, middle, (outputs, groups)) if not symmetric else np.zeros((outputs, groups), int)
        scales = _scales(outputs, groups, rng, 0.3 / (1 << bits))
        group_of = np.arange(inputs) // size
        tensors = {
            "weight_packed": pack(codes + middle, bits),
            "weight_shape": np.array([outputs, inputs]),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
        }
        scales = tensors["weight_scale"].float().numpy()
        if not symmetric:
            tensors["weight_zero_point"] = pack((zeros + middle).T, bits).T
        if shuffled:
            rng.shuffle(group_of)
            tensors["weight_g_idx"] = group_of.astype(np.int32)
        return tensors, _dense(codes, zeros, scales, group_of)

    return make


def integers(outputs: int, inputs: int, rng: np.random.Generator, group: int = -1) -> Made:
    size = inputs if group == -1 else group
    codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = _scales(outputs, inputs // size, rng, 0.001)
    dense = codes * scales.astype(np.float32).repeat(size, axis=1)
    return {"weight": codes, "weight_scale": scales}, dense


def floats(scale: str) -> Writer:
    """float8 with a scale for the "tensor", each "row", or blocks of 32 x 48."""

    def make(outputs: int, inputs: int, rng: np.random.Generator) -> Made:
        codes = torch.from_numpy(rng.normal(0, 30, (outputs, inputs))).to(torch.float8_e4m3fn)
        dense = codes.float().numpy()
        if scale == "tensor":
            value = np.float32(0.003)
            return {"weight": codes, "weight_scale": value, "input_scale": np.float32(1)}, dense * value
        if scale == "row":
            values = _scales(outputs, 1, rng, 0.003).astype(np.float32)
            return {"weight": codes, "weight_scale": values}, dense * values
        values = _scales(-(-outputs // 32), -(-inputs // 48), rng, 0.003).astype(np.float32)
        for o in range(outputs):
            dense[o] *= values[o // 32, np.arange(inputs) // 48]
        return {"weight": codes, "weight_scale_inv": values}, dense

    return make


def bnb4(kind: str, *, nested: bool, size: int = 64) -> Writer:
    def make(outputs: int, inputs: int, rng: np.random.Generator) -> Made:
        codes, levels = rng.integers(0, 16, outputs * inputs), np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        blocks = -(-len(codes) // size)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "shape": [outputs, inputs], "dtype": "bfloat16"}
        tensors: dict[str, np.ndarray | torch.Tensor] = {
            "weight": (codes[0::2] * 16 + codes[1::2]).astype(np.uint8)[:, None],
            "weight.quant_map": levels,
        }
        if nested:
            inner = rng.integers(0, 256, blocks).astype(np.uint8)
            table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            outer = rng.uniform(0.1, 0.2, -(-blocks // 16)).astype(np.float32)
            scales = table[inner] * outer[np.arange(blocks) // 16] + np.float32(0.25)
            tensors |= {"weight.absmax": inner, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.25}
        else:
            scales = rng.uniform(0.1, 0.3, blocks).astype(np.float32)
            tensors["weight.absmax"] = scales
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        dense = levels[codes] * scales[np.arange(len(codes)) // size]
        return tensors, dense.reshape(outputs, inputs)

    return make


def bnb8(outputs: int, inputs: int, rng: np.random.Generator) -> Made:
    codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    largest = rng.uniform(0.1, 0.3, outputs).astype(np.float32)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return tensors, codes * (largest / 127)[:, None]


def _scheme(kind: str, bits: int, strategy: str, inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    formats = {("int", 4): "pack-quantized", ("int", 8): "int-quantized", ("float", 8): "float-quantized"}
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": formats[kind, bits],
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False, **more}


@dataclass(frozen=True)
class Case:
    """A format: its `quantization_config`, and the function that makes a projection."""

    config: dict[str, Any]
    writer: Writer
    sizes: dict[str, int] = field(default_factory=lambda: {"hidden_size": 64, "intermediate_size": 96})
    rounds_inputs: bool = False


_INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_PACKED_8 = _scheme("int", 8, "group", group_size=GROUP) | {"format": "pack-quantized"}
CASES: dict[str, Case] = {
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Case(_gptq(4), gptq(4)),
    "gptq-zero": Case(_gptq(4), gptq(4, least=0)),
    "gptq-8": Case(_gptq(8, sym=True), gptq(8, symmetric=True)),
    "gptq-v2": Case(_gptq(4, checkpoint_format="gptq_v2"), gptq(4, version=2)),
    "gptq-v2-format": Case(_gptq(4, format="gptq_v2"), gptq(4, version=2)),
    "gptq-act": Case(_gptq(4, desc_act=True), gptq(4, shuffled=True)),
    "gptq-row": Case(_gptq(4, group_size=-1, sym=True), gptq(4, symmetric=True, group=-1)),
    "ct-w4": Case(_scheme("int", 4, "group", group_size=GROUP), packed_integers(4)),
    "ct-w4-asym": Case(
        _scheme("int", 4, "group", group_size=GROUP, symmetric=False), packed_integers(4, symmetric=False)
    ),
    "ct-w4-act": Case(
        _scheme("int", 4, "group", group_size=GROUP, actorder="group"), packed_integers(4, shuffled=True)
    ),
    "ct-w4-row": Case(_scheme("int", 4, "channel"), packed_integers(4, group=-1)),
    "ct-w8": Case(_PACKED_8, packed_integers(8)),
    "ct-int8": Case(_scheme("int", 8, "channel"), integers),
    "ct-w8a8": Case(_scheme("int", 8, "channel", _INT8_INPUTS), integers, rounds_inputs=True),
    "ct-w8a8-group": Case(
        _scheme("int", 8, "group", _INT8_INPUTS, group_size=GROUP), functools.partial(integers, group=GROUP)
    ),
    "ct-fp8": Case(_scheme("float", 8, "channel"), floats("row")),
    "ct-fp8-tensor": Case(_scheme("float", 8, "tensor", {"num_bits": 8, "type": "float"}), floats("tensor")),
    "fp8": Case({"quant_method": "fp8", "activation_scheme": "static"}, floats("tensor")),
    "fp8-blocks": Case({"quant_method": "fp8", "weight_block_size": [32, 48]}, floats("blocks")),
    "fp8-row": Case({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, floats("row")),
    "nf4": Case(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        bnb4("nf4", nested=True),
        {"hidden_size": 64, "intermediate_size": 128},
    ),
    "fp4-blocks-over-rows": Case(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, bnb4("fp4", nested=False)
    ),
    "bnb-int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, bnb8),
}


def write_quantized(source: Path, target: Path, case: Case, seed: int = 0) -> None:
    """Write `target` in a format, from the folder `source`, whose projections get random codes. The folder
    `target`/dense has the same weights in float32."""
    rng = np.random.default_rng(seed)
    packed: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", ".w1", ".w2", ".w3", ".c_attn", ".c_fc")):
            packed[name] = dense[name] = tensor
            continue
        is_transposed = ".h." in module  # GPT-2 stores plain weights as [I, O]
        tensors, weight = case.writer(*tensor.shape[:: -1 if is_transposed else 1], rng)
        if f"{module}.bias" in dense:
            tensors.pop("bias", None)
        for part, value in tensors.items():
            is_tensor = isinstance(value, torch.Tensor)
            packed[f"{module}.{part}"] = value if is_tensor else torch.from_numpy(np.ascontiguousarray(value))
        dense[name] = torch.from_numpy((weight.T if is_transposed else weight).astype(np.float32))
    raw = json.loads((source / "config.json").read_text())
    for folder, tensors, more in (
        (target, packed, {"quantization_config": case.config}),
        (target / "dense", dense, {}),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(raw | more))
