"""Masks of grammars on logits: what does not fit is -inf, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.platform.engine.sampling.grammars import mask_logits


@pytest.mark.parametrize("size", [7, 64, 1003])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_masks(size, share):
    random = np.random.default_rng(size)
    allowed = random.random((3, size)) < share
    packed = np.packbits(allowed, axis=1, bitorder="little")

    def fill(rows, masks):
        for row, mask in zip(rows, masks, strict=True):
            mask[:] = packed[row.number]

    grammar = SimpleNamespace(grammar=SimpleNamespace(fill=fill))
    rows = [SimpleNamespace(request=grammar, num_drafts=i, place=place, number=i) for i, place in enumerate((4, 0, 2))]
    before = torch.randn(5, size)
    after = before.clone()
    mask_logits(after, rows)
    expected = before.clone()
    for row in rows:
        expected[row.place, torch.from_numpy(~allowed[row.number])] = float("-inf")
    assert torch.equal(after, expected)
