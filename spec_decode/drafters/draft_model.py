"""A small causal LM that drafts for a large one (Leviathan et al. 2023, section 3; Chen et al. 2023).

Its layers are further layers of the target's block table: where the target keeps position i of a sequence, so does the
draft model. So blocks, prefix cache and preemption hold for both. `autoregressive` says who is computed when.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.device_outcome import DeviceOutcome
from ...models.batch import ForwardBatch, LayerKV, SequenceRows, build_batch
from ...models.checkpoint.loader import ModelOptions, load_model, read_facts, resolve_model_path
from ...models.checkpoint.vocabulary import agreement
from ...platform.core.errors import InvalidRequestError
from ...platform.core.quantization import rounding
from ...platform.core.speculative_config import SpeculativeConfig
from ..verify.draft_sampling import Drafting, DraftVocabulary, EditLogits, PassOutput, draw, most_likely_ids
from .autoregressive import (
    CatchUpLimits,
    draft_rows,
    known_rows,
    propose,
    propose_on_device,
    sampled_rows,
    warn_of_short_reach,
)
from .base import AdapterPreparer, Drafter, DrafterNeeds, DraftRow, Proposal, TargetOutput, no_adapters
from .factory import DrafterContext

if TYPE_CHECKING:
    from ...models.model import LanguageModel
    from ...models.pass_graphs import GraphedPass, PassGraphs, PassInputs


log = logging.getLogger(__name__)

MIN_AGREEMENT = 0.5
"""Share of tokens with the same id from which a draft model's vocabulary may be of another size than the target's."""


def load(config: SpeculativeConfig, context: DrafterContext) -> DraftModelDrafter:
    """Load `config.model` as a drafter.

    Raises:
        InvalidRequestError: its vocabulary is not the target's.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    path = resolve_model_path(config.model or "", revision=config.revision, cache_dir=config.download_dir)
    facts = read_facts(path, context.dtype)
    _check_vocabulary(config.model or "", path, facts.vocab_size, context)
    model = load_model(
        path,
        dtype=context.dtype,
        device=context.device,
        load_format=context.load_format,
        progress=context.progress,
        seed=context.seed,
        options=ModelOptions(quantization=rounding(config.quantization, facts.quantization, "speculative_config")),
    )
    warn_of_short_reach(config.model, facts.max_position_embeddings, context.max_model_len)
    return DraftModelDrafter(
        model,
        invariant=config.rejection_sample_method == "invariant",
        max_num_batched_tokens=context.max_num_batched_tokens,
        edit_logits=context.edit_logits,
        graphs=context.graphs,
        vocab_size=context.target.config.vocab_size,
    )


def kv_bytes_per_token(config: SpeculativeConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes a token in the model's layers, from its config.json alone; see `draft_kv_bytes_per_token`."""
    path = resolve_model_path(config.model or "", revision=config.revision, cache_dir=config.download_dir)
    return read_facts(path, dtype, kv_cache_dtype).kv_bytes_per_token


def _check_vocabulary(model: str, path: Path, vocab_size: int, context: DrafterContext) -> None:
    """Refuse a vocabulary of another size unless both are padded ones of tokenizers that agree; warn where tokens
    differ."""
    wanted = context.target.config.vocab_size
    share = None if context.model_path is None else agreement(Path(context.model_path), path)
    percent = "unknown, as a tokenizer.json is missing" if share is None else f"{share:.1%}"
    if vocab_size != wanted and (share is None or share < MIN_AGREEMENT):
        raise InvalidRequestError(
            f"speculative_config: the draft model {model} has a vocabulary of {vocab_size} tokens, the target one of "
            f"{wanted}; they must be the same, or padded ones of the same tokenizer (share of tokens that agree: "
            f"{percent})",
            param="speculative_config",
        )
    if share is not None and share < 1.0:
        log.warning(
            "speculative_config: the tokenizer of the draft model %s is not the target's, %s of the tokens agree; "
            "drafts of the others are rejected",
            model,
            percent,
        )


class DraftModelDrafter(Drafter):
    """Drafts by a causal LM with the target's vocabulary and each request's own sampling parameters.

    Greedy requests get its most likely tokens; requests under the drafter-invariant rule draw from its q with the noise
    that the target will use; the others draw with noise of their own, and q goes along for rejection sampling.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        invariant: bool = False,
        max_num_batched_tokens: int = 2048,
        edit_logits: EditLogits | None = None,
        graphs: PassGraphs | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`model` belongs to the drafter; `invariant`: the drafter-invariant rule holds for all requests. `graphs`:
        short passes are captured there. `vocab_size`: the target's, where it may be another than the model's."""
        self._model = model
        own_size = model.config.vocab_size
        vocab_size = own_size if vocab_size is None else vocab_size
        self._num_common = min(own_size, vocab_size)
        self._vocabulary: DraftVocabulary | None = None
        if own_size < vocab_size:
            self._vocabulary = DraftVocabulary(torch.arange(own_size, device=model.device), vocab_size)
        self._graphs = graphs
        if graphs is not None and graphs.captures(model):
            self._logits = graphs.row_logits(model.config.vocab_size, model.device)
        self._passes: GraphedPass | None = None
        self._invariant = invariant
        self._max_num_batched_tokens = max_num_batched_tokens
        self._edit_logits = edit_logits
        self._kv: Sequence[LayerKV] = ()
        self._limits: CatchUpLimits | None = None
        self._prepare_adapters: AdapterPreparer = no_adapters

    @property
    def needs(self) -> DrafterNeeds:
        """The draft model's layers, and its projections for adapters' draft weights."""
        return DrafterNeeds(
            kv_layers=tuple(self._model.kv_layers),
            linears=tuple(self._model.linears()),
            max_positions=self._model.config.max_position_embeddings,
            drafts_on_device=True,
        )

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """Its layers of the engine's cache; all of one block size."""
        self._kv = kv
        self._prepare_adapters = prepare_adapters
        if self._graphs is not None:
            self._passes = self._graphs.of(self._model, kv, self._compute, [prepare_adapters])
        self._limits = CatchUpLimits(
            block_size=kv[0].k.shape[2],
            num_positions=self._model.config.max_position_embeddings,
            max_num_batched_tokens=self._max_num_batched_tokens,
            invariant=self._invariant,
        )

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Catch up with `rows`, draft for those that ask for it. The KV of drafts is written behind their tokens."""
        assert self._limits is not None, "bind comes first"
        if target.on_device is None:
            return propose(self, rows, self._limits)
        return propose_on_device(self, rows, target.on_device, self._begin_on_device, self._limits)

    def begin(self, sequences: Sequence[Drafting], chunks: list[list[int]]) -> PassOutput:
        """See `TokenDrafter`."""
        return self._forward(sequences, known_rows(sequences, chunks))

    def _begin_on_device(self, sequences: Sequence[Drafting], outcome: DeviceOutcome) -> PassOutput:
        """See `BeginOnDevice`."""
        return self._forward(sequences, sampled_rows(sequences, outcome))

    def go_on(self, sequences: Sequence[Drafting], output: PassOutput) -> PassOutput:
        """See `TokenDrafter`; all that the model remembers is in its KV."""
        return self._forward(sequences, draft_rows(sequences, output))

    def draw(self, sequences: Sequence[Drafting], output: PassOutput) -> None:
        """See `TokenDrafter`."""
        logits = self._model.compute_logits(output.hidden) if output.logits is None else output.logits
        draw(sequences, self._common(logits), self._vocabulary, self._edit_logits, output.best, output.overshoot)

    def _common(self, logits: Tensor) -> Tensor:
        """Logits [B, V] without the tokens that the target lacks."""
        return logits if logits.shape[1] == self._num_common else logits[:, : self._num_common].contiguous()

    def _known(self, batch: ForwardBatch) -> ForwardBatch:
        """`batch` with the model's last token in place of tokens that the model lacks."""
        if self._vocabulary is not None:
            batch.input_ids.clamp_(max=self._num_common - 1)
        return batch

    def _forward(self, sequences: Sequence[Drafting], rows: SequenceRows) -> PassOutput:
        """Compute the `rows` of B sequences."""
        handles = [(s.row.request.adapter, count) for s, count in zip(sequences, rows.query_lens, strict=True)]
        found = None if self._passes is None else self._passes.run(rows, handles)
        if found is not None:
            return PassOutput(*(part[: len(sequences)] for part in found))
        batch = build_batch(rows, self._model, self._kv, self._prepare_adapters(handles))
        hidden = self._model.forward(self._known(batch)).hidden
        return PassOutput(*rows.last_of(hidden))

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute a `PassOutput` of all rows, in a graph."""
        hidden = self._model.forward(self._known(batch)).hidden.index_select(0, inputs.last)
        logits = self._model.compute_logits(hidden, out=self._logits[: len(hidden)])
        return hidden, logits, most_likely_ids(logits[:, : self._num_common])
