"""Logits of drafters that make all drafts of a row in one pass.

B sequences, T tokens of a pass, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from ...kernels.staging import upload

MAX_LOGITS_BYTES = 256 << 20
"""Most bytes of logits that are computed in one product, if not those of one draft of each row: 16 rows of 15 drafts
have 146 MB with Qwen3's vocabulary. Each further product reads the output head again."""


def logits_of_drafts(
    counts: Sequence[int], first: Tensor, hidden: Tensor, logits: Callable[[Tensor], Tensor], vocab_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states [B', H] and logits [B', V] of each draft in turn, of the B' sequences that have this draft.

    Args:
        counts: [B] number of drafts of each sequence, in descending order.
        first: [B] int64, index in `hidden` of the state of each one's first draft; those of further ones follow it.
        hidden: [T, H].
        logits: function from states [R, H] to float32 logits [R, V].
    """
    sizes = [int((np.array(counts) > draft).sum()) for draft in range(counts[0])]
    most = max(sizes[0], MAX_LOGITS_BYTES // (4 * vocab_size))
    draft = 0
    while draft < len(sizes):
        end = draft + 1
        while end < len(sizes) and sum(sizes[draft : end + 1]) <= most:
            end += 1
        together = sizes[draft:end]
        row, ahead = upload(
            hidden.device,
            np.concatenate([np.arange(size) for size in together]),
            np.repeat(np.arange(draft, end), together),
        )
        states = hidden.index_select(0, first[row] + ahead)
        yield from zip(states.split(together), logits(states).split(together), strict=True)
        draft = end
