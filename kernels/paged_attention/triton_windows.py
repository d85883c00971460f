"""Kinds of windows as constants of the GPU kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .options import Chunks, WholeRow, Window

IN_CHUNKS = tl.constexpr(2)
"""Value of HAS_WINDOW for chunks; True for sliding windows."""
IN_ROW = tl.constexpr(3)
"""Value of HAS_WINDOW for layers in which the queries of a row see each other."""


@triton.jit
def first_in_window(positions, window, HAS_WINDOW: tl.constexpr):
    """First key in the window of queries, in their chunks if HAS_WINDOW is IN_CHUNKS, or in their row if IN_ROW."""
    if HAS_WINDOW == IN_ROW:
        return positions * 0
    if HAS_WINDOW == IN_CHUNKS:
        return positions // window * window
    return positions - window + 1


def window_kind(window: Window) -> int:
    """Value of HAS_WINDOW for a layer's window."""
    if isinstance(window, WholeRow):
        return IN_ROW.value
    return IN_CHUNKS.value if isinstance(window, Chunks) else window is not None
