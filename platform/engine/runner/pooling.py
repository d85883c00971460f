"""Pooling of a prompt's hidden states, chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.batch import AdapterPreparer
from ....models.layers.score_head import ScoreHead
from ...core.batch import RowPlan
from ...core.sampling_params import CLASSIFY


def pooled_part(
    pooling: str, row: RowPlan, hidden: Tensor, score: ScoreHead | None, prepare_head: AdapterPreparer
) -> Tensor:
    """Part of the pooled [H] float32 on the CPU that `row`'s hidden [T, H] gives; the parts of a prompt are summed.

    Pooling "classify" gives the probabilities [labels] that `score` computes of the last token, with the adapter that
    `prepare_head` finds for it.
    """
    if pooling == "mean":
        return (hidden.float().sum(0) / row.request.num_prompt_tokens).cpu()
    if pooling == "cls":
        wanted, place = row.start == 0, 0
    else:
        wanted, place = row.end == row.request.num_prompt_tokens, -1
    if pooling == CLASSIFY:
        assert score is not None, "`check_params` refuses models without one"
        if not wanted:
            return torch.zeros(score.config.num_labels)
        return score.probs(hidden[place], prepare_head(row.request.handles(row.end - 1, 1))).cpu()
    return hidden[place].float().cpu() if wanted else torch.zeros(hidden.shape[1])
