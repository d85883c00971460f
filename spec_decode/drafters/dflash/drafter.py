"""DFlash and DSpark as drafters: all drafts of a row from one pass over a block of masks.

    position    0 ... n-1             n    n+1   n+2         block of 3 tokens, of which 2 are masks
    token       the target's context  tn   mask  mask        DFlash: the masks predict drafts; DSpark: tn does, too
    layers' KV  from the target's     from the block's own
                hidden states         hidden states

The KV of the context is written after every step, like hidden states for EAGLE heads, so the drafter never lags. The
KV of the block lies where the next step's context will be, and is overwritten by it.

A block has one mask for each draft that is wanted, as in vLLM, and not always as many as in training. Drafts of DFlash
are independent of each other given the context; those of DSpark are drawn in their order (`markov`).

B rows, T tokens of their blocks, K drafts, V tokens of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor

from ....kernels.device_outcome import DeviceOutcome, DeviceTokens
from ....kernels.staging import to_device
from ....models.batch import AdapterPreparer, ForwardBatch, LayerKV, SequenceRows, build_batch
from ....models.checkpoint.json_files import read_json
from ....models.checkpoint.paths import resolve_model_path
from ....models.pass_graphs import PassOptions
from ....models.quantization import unpack
from ....platform.core.speculative_config import SpeculativeConfig
from ...verify.draft_sampling import Drafting, draw, join_drafts, last_drafts, stays_on_device
from ...verify.verification import choose_rule
from ..autoregressive import TokenDrafterOptions, token_drafter_options, warn_of_short_reach
from ..base import Drafter, DrafterNeeds, DraftRow, Proposal, TargetOutput, no_adapters
from ..checkpoint import PARAM, fill, fill_randomly, quantise, read_tensor, refuse
from ..factory import DrafterContext
from ..one_pass import logits_of_drafts
from ..step_writer import StepWriter
from .config import DFlashConfig, dflash_kv_bytes_per_token, head_tensors, read_dflash_config, with_tensors
from .head import DFlashHead

if TYPE_CHECKING:
    from ....models.model import ModelConfig
    from ....models.pass_graphs import GraphedPass, PassInputs

_MASK_EMBEDDING = "mask_embedding.pt"


def load(config: SpeculativeConfig, context: DrafterContext) -> DFlashDrafter:
    """Load `config.model` as a drafter of the method that it names ("dflash" or "dspark").

    Raises:
        InvalidRequestError: it does not fit the target, is no such drafter, or its blocks are shorter than the user's
        `num_speculative_tokens`; with both figures.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    path = _path(config)
    head_config = _read_config(config, context.target.config)
    form = head_config.layer.quantization
    stored = {}
    if context.load_format == "dummy":
        head_config = _for_random_weights(head_config)
    else:
        stored = head_tensors(path)
        stored = stored if form is None else unpack(stored, form, lambda _: True, PARAM)
        head_config = with_tensors(head_config, stored.keys())
    head = DFlashHead(head_config, context.target, context.device)
    quantise(head.quantizable(), config, context, None if form is None else form.method)
    slots = head.weight_slots()
    if context.load_format == "dummy":
        if "d2t" in slots:
            slots.pop("d2t").load(torch.zeros(head_config.draft_vocab_size, dtype=torch.int64))
        fill_randomly(slots, context.seed)
    else:
        fill(path, slots, stored)
        if (path / _MASK_EMBEDDING).is_file():
            head.load_mask_embedding(read_tensor(path / _MASK_EMBEDDING))
    warn_of_short_reach(config.model, head_config.layer.max_position_embeddings, context.max_model_len)
    return DFlashDrafter(head, **token_drafter_options(config, context))


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse a drafter that does not fit the target, from its config.json alone."""
    _read_config(config, target)


def kv_bytes_per_token(config: SpeculativeConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes a token of the drafter's KV; see `draft_kv_bytes_per_token`."""
    return dflash_kv_bytes_per_token(_path(config), dtype, kv_cache_dtype)


def _path(config: SpeculativeConfig) -> Path:
    return resolve_model_path(config.model or "", draft=True, revision=config.revision, cache_dir=config.download_dir)


def _read_config(config: SpeculativeConfig, target: ModelConfig) -> DFlashConfig:
    found = read_dflash_config(read_json(_path(config) / "config.json"), config.method, target)
    if config.drafts_given and config.num_speculative_tokens > found.max_drafts:
        raise refuse(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but a block of {config.model} makes "
            f"{found.max_drafts} drafts (block_size {found.block_size})"
        )
    return found


def _for_random_weights(config: DFlashConfig) -> DFlashConfig:
    """`config` with embedding and head of its own if the target's do not fit."""
    smaller = config.draft_vocab_size != config.layer.vocab_size
    other = config.layer.hidden_size != config.target_hidden_size
    return dataclasses.replace(config, own_embedding=other, own_head=other or smaller, own_vocabulary=smaller)


class DFlashDrafter(Drafter):
    """Drafts by a `DFlashHead` with each request's own sampling parameters."""

    def __init__(self, head: DFlashHead, **options: Unpack[TokenDrafterOptions]) -> None:
        """`head` belongs to the drafter. `max_num_batched_tokens` does not apply: it never catches up."""
        self._head, self._config = head, head.config
        self._invariant = options.get("invariant", False)
        self._edit_logits = options.get("edit_logits")
        self._graphs = options.get("graphs")
        self._passes: GraphedPass | None = None
        self._kv: Sequence[LayerKV] = ()
        self._block_size = 0
        self._prepare_adapters: AdapterPreparer = no_adapters
        self._context: StepWriter | None = None

    @property
    def needs(self) -> DrafterNeeds:
        """Its layers, the target layers that it reads, and its projections."""
        config = self._config
        return DrafterNeeds(
            kv_layers=config.kv_layers,
            aux_layers=config.aux_layers,
            linears=tuple(self._head.linears()),
            max_drafts=config.max_drafts,
            max_positions=config.layer.max_position_embeddings - 1,
            drafts_on_device=True,
            never_lags=True,
            more_slots=0 if config.sample_from_anchor else 1,
        )

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache; all of one block size."""
        self._kv, self._block_size, self._prepare_adapters = kv, kv[0].k.shape[2], prepare_adapters
        self._context = StepWriter(partial(self._head.write_context, kv), self._head.device, adapts=True)
        self._context.bind(self._block_size, prepare_adapters)
        if self._graphs is not None:
            self._passes = self._graphs.of(
                self._head, kv, self._compute, [prepare_adapters], PassOptions(prompts=False)
            )

    @torch.inference_mode()
    def watch(self, rows: Sequence[DraftRow], target: TargetOutput) -> None:
        """Write the step's context, now or later."""
        assert self._context is not None, "bind comes first"
        step = target.on_device
        self._context.defer(rows, target.aux, None if step is None else step.overshoot)

    @torch.inference_mode()
    def flush(self) -> None:
        """Write the context of earlier steps."""
        if self._context is not None:
            self._context.flush()

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Write the step's context, and draft for the rows with `max_drafts` in one pass."""
        assert self._context is not None, "bind comes first"
        step = target.on_device
        self._context.write(rows, target.aux, None if step is None else step.overshoot)
        sequences = [
            Drafting(row, choose_rule(row.request, self._invariant), self._num_drafts(row, knows=step is None))
            for row in rows
        ]
        order = sorted((i for i, s in enumerate(sequences) if s.num_wanted > 0), key=lambda i: -sequences[i].num_wanted)
        if order:
            outcome = None
            if step is not None:
                assert step.outcome is not None, "rows with drafts reach their end"
                outcome = step.outcome.of(order)
            self._draft([sequences[i] for i in order], outcome)
        return [Proposal(s.drafts, len(s.row.tokens)) for s in sequences]

    def _num_drafts(self, row: DraftRow, *, knows: bool) -> int:
        """Drafts that a row gets. If the host `knows` its tokens, a row without room in its blocks gets fewer."""
        if not row.sampled or row.max_drafts == 0:
            return 0
        if not knows:
            return row.max_drafts
        config, last = self._config, len(row.tokens) - 1
        if row.num_valid < last:
            return 0
        slots = len(row.block_table) * self._block_size - last - (0 if config.sample_from_anchor else 1)
        return max(0, min(row.max_drafts, config.max_drafts, slots, self.needs.max_positions - last))

    def _draft(self, drafting: list[Drafting], outcome: DeviceOutcome | None) -> None:
        """Draft for B sequences, sorted by descending number of drafts; `outcome`: theirs, if the host does not know
        it."""
        rows = _block_rows(drafting, self._config, outcome)
        handles = [(s.row.request.adapter, count) for s, count in zip(drafting, rows.query_lens, strict=True)]
        found = None if self._passes is None else self._passes.run(rows, handles)
        if found is None:
            batch = build_batch(rows, self._head, self._kv, self._prepare_adapters(handles))
            found = (self._head.forward(batch),)
        overshoot = None if outcome is None else outcome.total
        before: Tensor | None = None
        if self._head.markov is not None:
            before = (
                outcome.next_tokens if outcome is not None else _tensor([s.row.tokens[-1] for s in drafting], found[0])
            )
        self._draw(drafting, self._by_draft(drafting, rows, found[0]), before, overshoot)
        join_drafts(drafting)

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute the blocks of all rows, in a graph."""
        return (self._head.forward(batch),)

    def _by_draft(
        self, drafting: list[Drafting], rows: SequenceRows, hidden: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`logits_of_drafts` of sequences, from hidden states [T, H] of all blocks."""
        starts = np.cumsum(rows.query_lens) - rows.query_lens + (0 if self._config.sample_from_anchor else 1)
        counts, first = [s.num_wanted for s in drafting], to_device(starts, hidden.device)
        return logits_of_drafts(counts, first, hidden, self._head.logits, self._config.draft_vocab_size)

    def _draw(
        self,
        drafting: list[Drafting],
        outputs: Iterator[tuple[Tensor, Tensor]],
        before: Tensor | None,
        overshoot: Tensor | None,
    ) -> None:
        """Draw all drafts. `before` [B]: the tokens before the first ones, for DSpark."""
        markov, vocabulary = self._head.markov, self._head.vocabulary
        state: Tensor | None = None
        for hidden, logits in outputs:
            wanted, confidence = drafting[: len(hidden)], None
            if markov is not None:
                assert before is not None
                if wanted[0].num_drafts:
                    before = _last_tokens(wanted, hidden)
                embedded = markov.embed(before[: len(wanted)])
                bias, state = markov.bias(embedded, hidden, None if state is None else state[: len(wanted)])
                logits.add_(bias)
                if wanted[0].row.is_rated and not stays_on_device(hidden):
                    confidence = markov.confidence(embedded, hidden)
            there = None if overshoot is None else overshoot[: len(wanted)]
            draw(wanted, logits, vocabulary, self._edit_logits, overshoot=there, confidence=confidence)


def _block_rows(drafting: Sequence[Drafting], config: DFlashConfig, outcome: DeviceOutcome | None) -> SequenceRows:
    """Rows of the blocks: the last token of each sequence, and masks."""
    masks = [s.num_wanted - 1 if config.sample_from_anchor else s.num_wanted for s in drafting]
    token_ids: list[int] = []
    firsts: list[int] = []
    for sequence, count in zip(drafting, masks, strict=True):
        firsts.append(len(token_ids))
        last = sequence.row.tokens[-1] if outcome is None else config.mask_token_id
        token_ids += [last, *[config.mask_token_id] * count]
    rows = SequenceRows(
        token_ids=token_ids,
        query_lens=[1 + count for count in masks],
        starts=[len(s.row.tokens) - 1 for s in drafting],
        block_tables=[s.row.block_table for s in drafting],
    )
    if outcome is not None:
        rows.device_tokens = [DeviceTokens(firsts, outcome.next_tokens, range(len(drafting)))]
        rows.overshoot = outcome.total
    return rows


def _last_tokens(drafting: Sequence[Drafting], like: Tensor) -> Tensor:
    """The last draft [B] of each sequence."""
    ids, on_device = last_drafts(drafting)
    found = _tensor([chunk[0] for chunk in ids], like)
    for tokens in on_device:
        tokens.fill(found)
    return found


def _tensor(ids: Sequence[int], like: Tensor) -> Tensor:
    return to_device(np.array(ids, dtype=np.int64), like.device)
