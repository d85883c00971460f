"""Zeros that take memory only in the pages that are used."""

import gc
from pathlib import Path

import pytest
import torch

from outrider.kernels.memory import lazy_zeros

PAGE = 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0,), (2, 0), (4, 1000, 64)])
def test_zeros_that_can_be_written(shape, dtype):
    zeros = lazy_zeros(shape, dtype)
    assert zeros.shape == shape
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert not zeros.any()
    zeros.fill_(3)
    assert (zeros == 3).all()


def test_a_view_keeps_the_memory():
    view = lazy_zeros((1000, 1000), torch.float32)[1:3].fill_(2.0)
    gc.collect()
    lazy_zeros((1000, 1000), torch.float32).fill_(5.0)
    assert (view == 2.0).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_what_is_not_used_takes_no_memory():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = resident()
    zeros = lazy_zeros((2**30,), torch.uint8)
    zeros[:: 2**28] = 1
    used = resident() - before
    assert used < 2**26
    del zeros
    gc.collect()
    assert resident() - before < 2**24


def test_another_device():
    assert lazy_zeros((2, 3), torch.float32, "meta").device.type == "meta"
