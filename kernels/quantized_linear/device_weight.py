"""Form in which a GPU reads a quantised weight: `QuantizedWeight` rearranged so that few bytes are read.

W[o, order[i]] = (level(codes[o, i]) · scales[i // group, o] + offsets[i // group, o]) · factors[o]; if inputs are
rounded, offsets are not multiplied by factors.

O outputs, I inputs, G groups, S bytes of a row of codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .weight import QuantizedWeight

ALIGNMENT = 128
"""Bytes to whose multiple a row of codes is padded: the longest block of a kernel."""
WHOLE = 1 << 30
"""Value of `group` when all inputs share one scale."""
_OUTPUTS = 16
"""Fewest outputs of a program."""
_LARGEST_OFFSET = 256
"""Largest quotient of an offset and its row's factor: float16 goes to 65504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWeight:
    """Rows of a weight that one launch multiplies."""

    form: str
    """Meaning of a code: "int4", "int8", "fp8", or with a table "levels4" and "levels8"."""
    codes: Tensor
    """[O, S] int8 for "int8", else uint8. Of 4 bits byte s holds codes s, in its lower half, and S + s. Each chunk is
    in the order of `arranged`."""
    factors: Tensor
    """[O] float32."""
    scales: Tensor | None
    """[G, O] float16, or float32 for products in float32; None: ones."""
    offsets: Tensor | None
    """[G, O], of the scales' dtype; None: minus `zero` times the scale."""
    levels: Tensor | None
    """[16 or 256] of the dtype of products."""
    order: Tensor | None
    """[I] int64."""
    group: int
    chunk: int
    """Bytes of a row that are arranged together, or 1: they are in the order of the inputs."""
    zero: int
    """Zero point that all groups share."""
    arrivals: Tensor
    """[ceil(O / 16)] int32, zeros between launches: how many programs of a launch in parts have ended. Launches with
    this weight must not run concurrently."""
    inputs: int
    rounds_inputs: bool
    """True: inputs are rounded to int8."""
    float8_scale: float | None = None
    """Scale with which inputs are rounded to float8; 0: each row has its own; None: they are not rounded."""
    float8_bound: float = math.inf
    """See `QuantizedWeight.float8_bound`."""
    has_one_factor: bool = False
    """True when all factors are equal."""

    @property
    def outputs(self) -> int:
        """O."""
        return len(self.codes)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.form.endswith("4") else 8

    @property
    def is_padded(self) -> bool:
        """True when rows of codes are longer than the inputs."""
        return self.codes.shape[1] * 8 // self.bits != self.inputs

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of a kernel that depend on the form."""
        return {
            "FORM": self.form,
            "GROUP": self.group,
            "ZERO": self.zero,
            "CHUNK": self.chunk,
            "HAS_SCALES": self.scales is not None,
            "HAS_OFFSETS": self.offsets is not None,
        }

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scales, offsets and levels as arguments of a kernel; others stand for those that are None."""
        scales = self.factors if self.scales is None else self.scales
        offsets = scales if self.offsets is None else self.offsets
        return scales, offsets, self.factors if self.levels is None else self.levels

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        tensors = (self.codes, self.factors, self.scales, self.offsets, self.levels, self.order, self.arrivals)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dense(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of W: [n, I] float32."""
        codes = _rearranged(self.codes[ids], self.chunk, (4, -1, 2, 2), (2, 3, 1, 4))
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), 1)
        codes = codes[:, : self.inputs]
        if self.levels is not None:
            numbers = self.levels[codes.long()].float()
        else:
            numbers = (codes.view(torch.float8_e4m3fn) if self.form == "fp8" else codes).float() - self.zero
        factors = self.factors[ids, None]
        if self.rounds_inputs:
            dense = numbers * factors if self.offsets is None else numbers * factors + self.offsets.t()[ids]
        else:
            groups = torch.arange(self.inputs, device=ids.device) // self.group
            for table, operation in ((self.scales, torch.Tensor.mul_), (self.offsets, torch.Tensor.add_)):
                if table is not None:
                    operation(numbers, table.t()[ids][:, groups])
            dense = numbers.mul_(factors)
        return dense if self.order is None else torch.empty_like(dense).index_copy_(1, self.order, dense)


def rounds_to_float8(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True when inputs of this weight are rounded to float8: the checkpoint specifies it, and tensor cores multiply it.
    `torch._scaled_mm` has results in bfloat16 on all devices, and shapes of multiples of 16, to which rows of codes are
    padded."""
    if weight.float8_scale is None or weight.codes.dtype != torch.float8_e4m3fn or weight.scales.shape[1] > 1:
        return False
    return dtype == torch.bfloat16 and len(weight.codes) % 16 == 0 and multiplies_float8(weight.codes.device)


def multiplies_float8(device: torch.device) -> bool:
    """True on a device whose tensor cores multiply float8: from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def chunk_of(group: int) -> int:
    """Bytes that are arranged together if `group` inputs share a scale: a thread then reads 16 bytes at a time."""
    return min(64, group & -group)


def arranged(codes: Tensor, chunk: int) -> Tensor:
    """Codes [O, S] in the order in which tensor cores take a row. Of 16 inputs, which one instruction multiplies, a
    thread has 2t, 2t + 1, 2t + 8 and 2t + 9, for t below 4; a chunk has all bytes of thread 0 first."""
    return _rearranged(codes, chunk, (-1, 2, 4, 2), (3, 1, 2, 4))


def _rearranged(codes: Tensor, chunk: int, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Each chunk of the rows, as an array of this shape, with its axes (from 1) in another order."""
    if chunk == 1:
        return codes
    whole = codes.reshape(-1, *(chunk // 16 if size < 0 else size for size in shape))
    return whole.permute(0, *order).reshape(codes.shape)


def is_served(weight: QuantizedWeight) -> bool:
    """True when there is a kernel for this form: groups are multiples of 16, the least that a dot product adds."""
    return weight.scales.shape[1] == 1 or weight.group % 16 == 0


def join(blocks: Sequence[QuantizedWeight], dtype: torch.dtype) -> list[DeviceWeight]:
    """Rearrange `blocks`, the rows of a weight in order, for products in `dtype`; adjacent ones of one form become
    one."""
    joined: list[list[DeviceWeight]] = []
    for block in blocks:
        stored = _store(block, dtype)
        if joined and is_alike(joined[-1][0], stored):
            joined[-1].append(stored)
        else:
            joined.append([stored])
    return [parts[0] if len(parts) == 1 else _concatenate(parts) for parts in joined]


def is_alike(a: DeviceWeight, b: DeviceWeight) -> bool:
    """True when both have one form, so that one kernel multiplies them."""
    plain = all(getattr(a, name) == getattr(b, name) for name in ("form", "group", "chunk", "zero", "rounds_inputs"))
    plain = plain and (a.float8_scale is None) is (b.float8_scale is None)
    both = [(getattr(a, name), getattr(b, name)) for name in ("scales", "offsets", "levels", "order")]
    if not plain or any((x is None) is not (y is None) for x, y in both):
        return False
    return all(x is None or torch.equal(x, y) for x, y in both[2:])


def _concatenate(parts: Sequence[DeviceWeight]) -> DeviceWeight:
    def columns(tables: Sequence[Tensor | None]) -> Tensor | None:
        found = [table for table in tables if table is not None]
        return torch.cat(found, 1) if found else None

    float8_scales = [part.float8_scale for part in parts if part.float8_scale is not None]
    return replace(
        parts[0],
        # One rounding serves all parts: the largest scale and the largest bound cut off no more than their parts do.
        float8_scale=(max(float8_scales) if all(float8_scales) else 0.0) if float8_scales else None,
        float8_bound=max(part.float8_bound for part in parts),
        has_one_factor=all(part.has_one_factor for part in parts) and len({float(p.factors[0]) for p in parts}) == 1,
        codes=torch.cat([part.codes for part in parts]),
        factors=torch.cat([part.factors for part in parts]),
        scales=columns([part.scales for part in parts]),
        offsets=columns([part.offsets for part in parts]),
        arrivals=torch.cat([part.arrivals for part in parts]),
    )


def _store(weight: QuantizedWeight, dtype: torch.dtype) -> DeviceWeight:
    form, codes, offsets, zero = _rearrange(weight)
    groups = weight.scales.shape[1]
    scales: Tensor | None = weight.scales
    if weight.input_bits is not None or (groups == 1 and offsets is None and form in ("int8", "fp8")):
        factors, scales = weight.scales[:, 0].contiguous(), None
        offsets = None if offsets is None else offsets.t().contiguous()
    else:
        largest = weight.scales.abs().amax(1)
        if offsets is not None:
            largest = torch.maximum(largest, offsets.abs().amax(1) / _LARGEST_OFFSET)
        factors = torch.where(largest > 0, largest, 1.0)
        # The last groups of the padding may have no scale.
        padding = -(-codes.shape[1] * (2 if weight.bits == 4 else 1) // weight.group) - groups if groups > 1 else 0
        kept = torch.float32 if dtype == torch.float32 else torch.float16

        def relative(values: Tensor) -> Tensor:
            return F.pad((values / factors[:, None]).to(kept), (0, max(0, padding))).t().contiguous()

        scales = relative(weight.scales)
        offsets = None if offsets is None else relative(offsets)
    group = WHOLE if groups == 1 else weight.group
    chunk = 1 if dtype == torch.float32 or weight.input_bits is not None else chunk_of(group)
    rounds_float8 = rounds_to_float8(weight, dtype)
    return DeviceWeight(
        form=form,
        codes=arranged(codes, chunk),
        factors=factors,
        scales=scales,
        offsets=offsets,
        levels=None if weight.levels is None else weight.levels.to(dtype),
        order=weight.order,
        group=group,
        chunk=chunk,
        zero=zero,
        arrivals=torch.zeros(-(-len(codes) // _OUTPUTS), dtype=torch.int32, device=codes.device),
        inputs=weight.shape[1],
        rounds_inputs=weight.input_bits == 8,
        float8_scale=weight.float8_scale if rounds_float8 else None,
        float8_bound=weight.float8_bound,
        has_one_factor=rounds_float8 and bool((factors == factors[0]).all()),
    )


def _rearrange(weight: QuantizedWeight) -> tuple[str, Tensor, Tensor | None, int]:
    """Form, codes, offsets and common zero point."""
    codes, offsets = weight.codes, weight.offsets
    middle = 1 << weight.bits - 1
    is_centred = offsets is not None and torch.equal(offsets, -middle * weight.scales)
    if weight.bits == 4:
        half = -(-codes.shape[1] // (2 * ALIGNMENT)) * ALIGNMENT
        codes = F.pad(codes, (0, 2 * half - codes.shape[1]))
        codes = codes[:, :half] | codes[:, half:] << 4
        if weight.levels is not None:
            return "levels4", codes, offsets, 0
        return "int4", codes, None if is_centred else offsets, middle if is_centred else 0
    form = "levels8" if weight.levels is not None else "int8"
    if codes.dtype == torch.float8_e4m3fn:
        form, codes = "fp8", codes.view(torch.uint8)
    elif codes.dtype == torch.uint8 and weight.levels is None:
        codes = (codes ^ 128).view(torch.int8)
        if is_centred:
            offsets = None
        else:
            offsets = middle * weight.scales if offsets is None else offsets + middle * weight.scales
    return form, F.pad(codes, (0, -codes.shape[1] % ALIGNMENT)), offsets, 0
