"""Medusa as a drafter: each of its heads predicts one token, all from one hidden state of the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.staging import to_device
from ....models.batch import AdapterPreparer, LayerKV
from ....models.checkpoint.json_files import read_json
from ....models.checkpoint.paths import resolve_model_path
from ....models.graphed_rows import GraphedRows
from ....models.pass_grid import bucket
from ....platform.core.speculative_config import SpeculativeConfig
from ...verify.draft_sampling import Drafting, EditLogits, append_best, draw, join_drafts, most_likely_ids, takes_best
from ...verify.verification import choose_rule
from ..base import Drafter, DrafterNeeds, DraftRow, Proposal, TargetOutput, no_adapters
from ..checkpoint import fill, fill_randomly, quantise, read_tensors, refuse
from ..factory import DrafterContext
from .heads import MedusaHeads, canonical_names, read_medusa_config, with_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from ....models.model import ModelConfig
    from ....models.pass_graphs import PassGraphs

MAX_LOGITS_BYTES = 256 << 20
"""Most memory for logits of captured heads. With more rows a step is long enough for the host to stay ahead."""
_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse heads that do not fit the target, from their config.json alone."""
    path = resolve_model_path(config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir)
    read_medusa_config(read_json(path / "config.json"), target)


def load(config: SpeculativeConfig, context: DrafterContext) -> MedusaDrafter:
    """Load `config.model` as Medusa heads for the target.

    Raises:
        InvalidRequestError: they do not fit the target, or are fewer than the user's `num_speculative_tokens`; with
        both figures. (If no number was given, a step gets as many drafts as there are heads.)
        NotFoundError: files are missing.
    """
    path = resolve_model_path(config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir)
    heads_config = read_medusa_config(read_json(path / "config.json"), context.target.config)
    stored = {}
    if context.load_format != "dummy":
        stored = canonical_names(read_tensors(path, extra=_WEIGHTS))
        heads_config = with_tensors(heads_config, stored)
    if config.drafts_given and config.num_speculative_tokens > heads_config.num_heads:
        raise refuse(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but {config.model} has "
            f"{heads_config.num_heads} Medusa heads: each makes one draft"
        )
    heads = MedusaHeads(heads_config, context.device)
    quantise(heads.quantizable(), config, context, None)
    if context.load_format == "dummy":
        fill_randomly(heads.weight_slots(), context.seed)
    else:
        fill(path, heads.weight_slots(), stored)
    invariant = config.rejection_sample_method == "invariant"
    return MedusaDrafter(heads, invariant=invariant, edit_logits=context.edit_logits, graphs=context.graphs)


class MedusaDrafter(Drafter):
    """Drafts by Medusa heads with each request's own sampling parameters. Keeps nothing between steps.

    Head i draws from its own q, independent of the heads before it; both verification rules allow that.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        invariant: bool = False,
        edit_logits: EditLogits | None = None,
        graphs: PassGraphs | None = None,
    ) -> None:
        """`invariant`: the drafter-invariant rule holds for all requests. `graphs`: for few rows the heads are captured
        there."""
        self._heads = heads
        self._graphs = graphs
        if graphs is not None:
            self._states, self._logits = _captured_memory(heads, bucket(graphs.limits.max_rows))
        self._passes: GraphedRows | None = None
        self._invariant = invariant
        self._edit_logits = edit_logits
        self._prepare_adapters: AdapterPreparer = no_adapters

    @property
    def weights(self) -> Sequence[Any]:
        """See `Drafter`."""
        return (self._heads,)

    @property
    def needs(self) -> DrafterNeeds:
        """No layers; the projections of its residual blocks."""
        return DrafterNeeds(
            linears=tuple(self._heads.linears()), max_drafts=self._heads.config.num_heads, drafts_on_device=True
        )

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Nothing of the cache."""
        self._prepare_adapters = prepare_adapters
        if self._graphs is not None:
            most = self._heads.config.num_heads
            self._passes = GraphedRows(self._graphs, self._states, self._compute, prepare_adapters, most)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts for the rows with `max_drafts`, from the hidden state at the last valid position."""
        sequences = self._sequences(rows)
        order = _by_number(sequences)
        if order:
            assert target.hidden is not None
            drafting, overshoot = [sequences[i] for i in order], None
            last = [s.row.first_index + s.row.num_valid - 1 - s.row.start for s in drafting]
            index = to_device(np.array(last), target.hidden.device)
            if target.on_device is not None:
                assert target.on_device.outcome is not None, "rows with drafts reach their end"
                outcome = target.on_device.outcome.of(order)
                overshoot = outcome.total
                index = index if outcome.unused is None else index - outcome.unused
            self._draft(drafting, target.hidden.index_select(0, index), overshoot)
        return [Proposal(s.drafts, len(s.row.tokens)) for s in sequences]

    def _sequences(self, rows: Sequence[DraftRow]) -> list[Drafting]:
        most = self._heads.config.num_heads
        return [
            Drafting(row, choose_rule(row.request, self._invariant), min(row.max_drafts, most) if row.sampled else 0)
            for row in rows
        ]

    def _draft(self, drafting: list[Drafting], hidden: Tensor, overshoot: Tensor | None = None) -> None:
        """Drafts for sequences, sorted by descending number of drafts, from their hidden states [B, H]."""
        if self._passes is not None:
            found = self._passes.run(hidden, [s.row.request.adapter for s in drafting], drafting[0].num_wanted)
            if found is not None:
                logits, best = found
                self._draw(drafting, logits, best, overshoot)
                return
        count, adapters = -1, None
        for head in range(drafting[0].num_wanted):
            wanted = [s for s in drafting if s.num_wanted > head]
            if len(wanted) != count:
                count = len(wanted)
                adapters = self._prepare_adapters([(s.row.request.adapter, 1) for s in wanted])
            of_head = self._heads.logits(head, hidden[:count], adapters)
            draw(wanted, of_head, edit=self._edit_logits, overshoot=_first(overshoot, count))
        join_drafts(drafting)

    def _draw(self, drafting: list[Drafting], logits: Tensor, best: Tensor, overshoot: Tensor | None) -> None:
        """Drafts from the result of `_compute` for these rows, sorted by descending number of drafts."""
        if takes_best(drafting, self._edit_logits):
            append_best(drafting, best)
            return
        for head in range(drafting[0].num_wanted):
            wanted = [s for s in drafting if s.num_wanted > head]
            there = _first(overshoot, len(wanted))
            draw(wanted, logits[head, : len(wanted)], edit=self._edit_logits, overshoot=there)
        join_drafts(drafting)

    def _compute(self, hidden: Tensor, adapters: Any, num_heads: int) -> tuple[Tensor, ...]:
        """Compute, in a graph, logits [num_heads, rows, V] float32 of the first heads, and the most likely tokens
        [num_heads, rows]."""
        shape = (num_heads, len(hidden), self._heads.config.vocab_size)
        logits = self._logits[: math.prod(shape)].view(shape)
        for head in range(num_heads):
            self._heads.logits(head, hidden, adapters, out=logits[head])
        return logits, most_likely_ids(logits)


def _captured_memory(heads: MedusaHeads, most_rows: int) -> tuple[Tensor, Tensor]:
    """Memory for the rows and the logits of captured heads; allocated before the KV cache, which gets the rest."""
    config = heads.config
    rows = min(most_rows, MAX_LOGITS_BYTES // (4 * config.num_heads * config.vocab_size))
    states = torch.zeros(rows, config.hidden_size, dtype=config.dtype, device=heads.device)
    logits = torch.empty(config.num_heads * rows * config.vocab_size, dtype=torch.float32, device=heads.device)
    return states, logits


def _by_number(sequences: Sequence[Drafting]) -> list[int]:
    """Indices of the sequences that want drafts, by number of drafts: each head serves a prefix of the rows."""
    return sorted((i for i, s in enumerate(sequences) if s.num_wanted > 0), key=lambda i: -sequences[i].num_wanted)


def _first(overshoot: Tensor | None, count: int) -> Tensor | None:
    return None if overshoot is None else overshoot[:count]
