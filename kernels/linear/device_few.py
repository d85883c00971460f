"""Launches of the product of few tokens (`triton_few.py`), and its trial against the library's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import TritonError

from ..graphs import CudaGraphs
from ..lora.groups import FEW_TOKENS
from ..rms_norm import NormWeight
from .triton_few import BLOCK_O, BLOCK_R, NUM_STAGES, NUM_WARPS, few_rows_kernel, step_inputs

if TYPE_CHECKING:
    from ..lora.device_rows import Expansion

logger = logging.getLogger(__name__)

_PROGRAMS = 264
"""Programs that large devices run at a time, two on each of 132 multiprocessors; with fewer the inputs are split."""
_MAX_PARTS = 8
_LEAST = 512
"""Fewest inputs of a part."""
MAX_SLICES = 3
ROWS = (1, 4, 8, FEW_TOKENS)
"""Tokens of the inputs of a trial, ascending."""
ROUNDS = 5
"""Rounds of a trial, of which the shortest counts."""
REPEATS = 20
"""Products of a captured graph of a trial, so that its start counts little."""
TOLERANCE = 1.02
"""Ratio of two times that count as equal. The launches that the kernel saves are not counted in its favour."""
ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of a trial's results as a part of the largest result."""


class FewRowsLinear:
    """Products of up to `most_rows` tokens with a weight, which is not copied.

    Two calls must not run concurrently: they share the count of finished programs.
    """

    __slots__ = ("_arrivals", "_bias", "_sizes", "_weight", "most_rows")

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], most_rows: int = FEW_TOKENS) -> None:
        """Keep `weight` [out, in], contiguous, and `bias` [out]; `sizes` are the outputs of up to three slices."""
        assert weight.stride(1) == 1
        assert sum(sizes) == len(weight)
        assert len(sizes) <= MAX_SLICES
        assert most_rows <= FEW_TOKENS
        self._weight, self._bias, self._sizes = weight, bias, tuple(sizes)
        self.most_rows = most_rows
        """Most tokens of a call."""
        blocks = sum(triton.cdiv(size, BLOCK_O) for size in sizes)
        self._arrivals = torch.zeros(blocks, dtype=torch.int32, device=weight.device)

    def __call__(
        self,
        x: Tensor,
        *,
        norm: NormWeight | None = None,
        activation: str = "",
        residual: Tensor | None = None,
        expansion: Expansion | None = None,
    ) -> Tensor:
        """norm(x) Wᵀ + b + the adapters' part, then the gated activation of both halves, and + residual, as a new
        tensor.

        Args:
            x: [T, in], of the weight's dtype.
            norm: Weights of the RMS norm of x; None: x has it already.
            activation: Name of a gated activation of `act_and_mul` that has gate and up as halves; "": none.
            residual: [T, outputs]; added before the result is rounded to the dtype.
            expansion: Adapters of the tokens, with their shrunk inputs.
        """
        num_tokens, inputs = x.shape
        assert 0 < num_tokens <= self.most_rows
        assert activation != "clamped_swiglu"
        outputs = len(self._weight) // 2 if activation else len(self._weight)
        sizes = (outputs,) if activation else self._sizes
        y = torch.empty(num_tokens, outputs, dtype=x.dtype, device=x.device)
        x = x if x.stride(1) == 1 else x.contiguous()
        added = y if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
        blocks = sum(triton.cdiv(size, BLOCK_O) for size in sizes)
        parts, sums = self._parts(blocks, inputs), y
        if parts > 1:
            sums = torch.empty(parts, num_tokens, len(self._weight) + blocks, dtype=torch.float32, device=x.device)
        scale, unit, root = (y, 1.0, 0.0) if norm is None else (norm.scale, norm.unit, norm.root_value)
        given = (y, y, self._arrivals, y, 0, 0, 0, 1, 1, 1) if expansion is None else tuple(expansion)
        b, live, groups, h, *numbers = given
        step = step_inputs(x.element_size())
        few_rows_kernel[(blocks * parts,)](
            *(x, scale, self._weight, y if self._bias is None else self._bias, added, y, sums, self._arrivals),
            *(b, live, groups, h, unit, root * root),
            *(num_tokens, inputs, x.stride(0), self._weight.stride(0), added.stride(0), y.stride(0), *numbers),
            **dict(zip(("SIZE_0", "SIZE_1", "SIZE_2"), (*sizes, 0, 0), strict=False)),
            HAS_NORM=norm is not None,
            HAS_BIAS=self._bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_ADAPTERS=expansion is not None,
            ACTIVATION=activation,
            UP_SLICE=len(self._sizes) - 1 if activation else 0,
            IS_PADDED=inputs % step != 0,
            PARTS=parts,
            BLOCK_O=BLOCK_O,
            BLOCK_T=FEW_TOKENS,
            BLOCK_K=step,
            BLOCK_R=BLOCK_R,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        return y

    @staticmethod
    def _parts(blocks: int, inputs: int) -> int:
        """Parts of the inputs of a launch with `blocks` blocks of outputs."""
        return max(1, min(_MAX_PARTS, _PROGRAMS // blocks, inputs // _LEAST))


Measure = Callable[[Callable[[], Tensor]], float]
"""Function that measures the seconds of some launches."""


_tried: dict[tuple[torch.Size, torch.dtype, torch.device], int] = {}
"""Results of the trials of this process."""


def tried_rows(weight: Tensor, measure: Measure | None = None) -> int:
    """Most tokens for which the kernel is not slower than the library's product with `weight`; 0: for one token it is,
    or its results are wrong. Each shape and dtype is tried once, in less than a second after the compilation."""
    key = weight.shape, weight.dtype, weight.device
    if key not in _tried:
        _tried[key] = _try(weight, measure or graph_seconds)
    return _tried[key]


@torch.inference_mode()
def _try(weight: Tensor, measure: Measure) -> int:
    outputs, inputs = weight.shape
    ours = FewRowsLinear(weight, None, [outputs])
    most = 0
    try:
        for rows in ROWS:
            x = torch.randn(rows, inputs, dtype=weight.dtype, device=weight.device)
            if not _agree(ours(x), F.linear(x, weight)):
                logger.warning("the product of few tokens is wrong for %dx%d and not used there", outputs, inputs)
                return 0
            products = functools.partial(ours, x), functools.partial(F.linear, x, weight)
            if measure(products[0]) > TOLERANCE * measure(products[1]):
                return most
            most = rows
    except (RuntimeError, TritonError) as error:
        logger.warning("the product of few tokens is not used for %dx%d: %s", outputs, inputs, error)
        return 0
    return most


def _agree(y: Tensor, expected: Tensor) -> bool:
    error = (y.float() - expected.float()).abs().amax()
    return bool(error <= ERRORS[y.dtype] * expected.float().abs().amax())


def graph_seconds(work: Callable[[], Tensor]) -> float:
    """Time of `work` on the device in seconds: the shortest of some replays of a graph that repeats it, since the host
    needs longer to launch a kernel than it runs."""
    device = work().device
    captured = CudaGraphs(device).capture(lambda: tuple(work() for _ in range(REPEATS)))
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / REPEATS)
    return min(times)
