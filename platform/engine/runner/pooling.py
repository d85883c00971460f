"""Pooling of a prompt's hidden states, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.layers.score_head import ScoreHead
from ...core.batch import RowPlan
from ...core.sampling_params import CLASSIFY


def pooled_part(pooling: str, row: RowPlan, hidden: Tensor, score: ScoreHead | None) -> Tensor:
    """Part of the pooled [H] float32 on the CPU that `row`'s hidden [T, H] gives; the parts of a prompt are summed.

    Pooling "classify" gives the probabilities [labels] that `score` computes of the last token.
    """
    if pooling == "mean":
        return (hidden.float().sum(0) / row.request.num_prompt_tokens).cpu()
    if pooling == "cls":
        wanted, place = row.start == 0, 0
    else:
        wanted, place = row.end == row.request.num_prompt_tokens, -1
    if pooling == CLASSIFY:
        assert score is not None, "`check_params` refuses models without one"
        return score.probs(hidden[place]).cpu() if wanted else torch.zeros(score.config.num_labels)
    return hidden[place].float().cpu() if wanted else torch.zeros(hidden.shape[1])
