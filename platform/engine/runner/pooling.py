"""Pooling of a prompt's hidden states, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.batch import RowPlan


def pooled_part(pooling: str, row: RowPlan, hidden: Tensor) -> Tensor:
    """Part of the pooled [H] float32 on the CPU that `row`'s hidden [T, H] gives; the parts of a prompt are summed."""
    if pooling == "mean":
        return (hidden.float().sum(0) / row.request.num_prompt_tokens).cpu()
    if pooling == "cls":
        wanted, place = row.start == 0, 0
    else:
        wanted, place = row.end == row.request.num_prompt_tokens, -1
    return hidden[place].float().cpu() if wanted else torch.zeros(hidden.shape[1])
