"""A small causal LM that drafts for a large one (Leviathan et al. 2023, section 3; Chen et al. 2023).

Its layers are further layers of the target's block table: both keep position i of a sequence in the same slot, and
share blocks, prefix cache and preemption. `autoregressive` has the order of passes.

If the two have different tokenizers, drafts are of the tokens that both have (Timor et al. 2025, arXiv 2502.05202:
token-level intersection), and the draft model reads one token of its own for each of the target's (`Translation`). So
both still have position i of a sequence in common.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ...models.batch import ForwardBatch, SequenceRows, build_batch
from ...models.checkpoint.loader import ModelOptions, load_model, read_facts
from ...models.checkpoint.paths import resolve_model_path
from ...models.checkpoint.vocabulary import Translation, agreement, translation
from ...platform.core.errors import InvalidRequestError
from ...platform.core.speculative_config import SpeculativeConfig
from ..verify.draft_sampling import DraftVocabulary, PassOutput, most_likely_ids
from .autoregressive import TokenDrafter, TokenDrafterOptions, token_drafter_options, warn_of_short_reach
from .base import DrafterNeeds
from .checkpoint import draft_rounding
from .factory import DrafterContext

if TYPE_CHECKING:
    from ...models.model import LanguageModel, ModelConfig
    from ...models.pass_graphs import PassInputs


log = logging.getLogger(__name__)

MIN_AGREEMENT = 0.5
"""Minimum share of tokens with the same id for a draft model that reads and drafts the target's ids as they are."""
MIN_COMMON = 0.5
"""Minimum share, of the smaller vocabulary, of tokens with the same text for a draft model with another tokenizer.
With fewer, the context that it reads is hardly the request's."""


def load(config: SpeculativeConfig, context: DrafterContext) -> DraftModelDrafter:
    """Load `config.model` as a drafter.

    Raises:
        InvalidRequestError: its vocabulary is not the target's.
        NotFoundError, UnsupportedModelError: as for any model.
    """
    path = resolve_model_path(config.model or "", revision=config.revision, cache_dir=config.download_dir)
    facts = read_facts(path, context.dtype)
    size, folder = context.target.config.vocab_size, context.model_path
    translated = _match_vocabularies(
        config.model or "", (path, facts.vocab_size), (folder and Path(folder), size), warns=True
    )
    model = load_model(
        path,
        dtype=context.dtype,
        device=context.device,
        load_format=context.load_format,
        progress=context.progress,
        seed=context.seed,
        options=ModelOptions(quantization=draft_rounding(config, context, facts.quantization)),
    )
    warn_of_short_reach(config.model, facts.max_position_embeddings, context.max_model_len)
    return DraftModelDrafter(model, vocab_size=size, translated=translated, **token_drafter_options(config, context))


def kv_bytes_per_token(config: SpeculativeConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes a token in the model's layers, from its config.json alone; see `draft_kv_bytes_per_token`."""
    path = resolve_model_path(config.model or "", revision=config.revision, cache_dir=config.download_dir)
    return read_facts(path, dtype, kv_cache_dtype).kv_bytes_per_token


def check(config: SpeculativeConfig, target: ModelConfig, model_path: Path) -> None:
    """Refuse a draft model whose vocabulary is not that of the target, from their files alone."""
    path = resolve_model_path(config.model or "", revision=config.revision, cache_dir=config.download_dir)
    facts = read_facts(path)
    if facts.state_bytes:
        raise InvalidRequestError(
            f"speculative_config: the draft model {config.model} ({facts.architecture}) has layers with recurrent "
            "state; such models are served, and do not draft",
            param="speculative_config",
        )
    _match_vocabularies(config.model or "", (path, facts.vocab_size), (model_path, target.vocab_size))


def _match_vocabularies(
    model: str, own: tuple[Path, int], target: tuple[Path | str | None, int], *, warns: bool = False
) -> Translation | None:
    """Translation from the target's tokens to those of a draft model with another tokenizer; None: ids are used as they
    are. Warns if tokens differ. `own` and `target`: folder and size of the vocabulary.

    Raises:
        InvalidRequestError: the tokenizers have too little in common; with the figures.
    """
    (path, vocab_size), (folder, wanted) = own, target
    share = None if not folder else agreement(Path(folder), path)
    found = None
    if folder and share is not None and share < MIN_AGREEMENT:
        found = translation(Path(folder), path, (wanted, vocab_size))
    if found is not None and found.share >= MIN_COMMON:
        if warns:
            log.warning(
                "speculative_config: the draft model %s has another tokenizer than the target; it drafts the %d tokens "
                "that both have, %.1f%% of the smaller vocabulary",
                model,
                len(found.common),
                100 * found.share,
            )
        return found
    percent = "unknown, as a tokenizer.json is missing" if share is None else f"{share:.1%}"
    if vocab_size != wanted and (share is None or share < MIN_AGREEMENT):
        texts = "" if found is None else f"; with the same text: {found.share:.1%}, at least {MIN_COMMON:.0%} is needed"
        raise InvalidRequestError(
            f"speculative_config: the draft model {model} has a vocabulary of {vocab_size} tokens, the target one of "
            f"{wanted}; they must be the same, or padded ones of the same tokenizer, or have most texts in common "
            f"(share of tokens that agree: {percent}{texts})",
            param="speculative_config",
        )
    if warns and share is not None and share < 1.0:
        log.warning(
            "speculative_config: the tokenizer of the draft model %s is not the target's, %s of the tokens agree; "
            "drafts of the others are rejected",
            model,
            percent,
        )
    return None


class DraftModelDrafter(TokenDrafter):
    """Drafts by a causal LM with each request's own sampling parameters.

    Greedy requests get its most likely tokens; requests under the drafter-invariant rule draw from its q with the noise
    that the target will use; the others draw with noise of their own, and keep q for rejection sampling.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        vocab_size: int | None = None,
        translated: Translation | None = None,
        **options: Unpack[TokenDrafterOptions],
    ) -> None:
        """`model` belongs to the drafter. `vocab_size`: the target's, which may differ from the model's. `translated`:
        from the target's tokens, if the tokenizers differ."""
        own_size = model.config.vocab_size
        super().__init__(model, own_size, **options)
        self._model = model
        vocab_size = own_size if vocab_size is None else vocab_size
        self._num_common = min(own_size, vocab_size)
        self._vocabulary: DraftVocabulary | None = None
        self._columns: Tensor | None = None  # logits of tokens that both have, if they are not the first ones
        self._stand_ins: Tensor | None = None  # [V]
        if translated is not None:
            common, self._columns, self._stand_ins = (torch.tensor(ids, device=model.device) for ids in translated[:3])
            self._vocabulary = DraftVocabulary(common, vocab_size)
        elif own_size < vocab_size:
            self._vocabulary = DraftVocabulary(torch.arange(own_size, device=model.device), vocab_size)

    @property
    def weights(self) -> Sequence[Any]:
        """See `Drafter`."""
        return (self._model,)

    @property
    def needs(self) -> DrafterNeeds:
        """The draft model's layers, and its projections for adapters' draft weights."""
        return DrafterNeeds(
            kv_layers=tuple(self._model.kv_layers),
            linears=tuple(self._model.linears()),
            max_positions=self._model.config.max_position_embeddings,
            drafts_on_device=True,
        )

    def _draw_from(self, output: PassOutput) -> tuple[Tensor, DraftVocabulary | None]:
        """Logits without those of tokens that the target lacks."""
        logits = self._model.compute_logits(output.hidden) if output.logits is None else output.logits
        return self._common(logits).contiguous(), self._vocabulary

    def _common(self, logits: Tensor) -> Tensor:
        """Logits [B, C] of the tokens that both models have."""
        if self._columns is not None:
            return logits.index_select(1, self._columns)
        return logits[:, : self._num_common]

    def _known(self, batch: ForwardBatch) -> ForwardBatch:
        """`batch` with tokens of the model's in place of the target's: the one that stands for it, or the last one for
        all that the model lacks."""
        if self._stand_ins is not None:
            batch.input_ids.copy_(self._stand_ins[batch.input_ids.clamp(max=len(self._stand_ins) - 1)])
        elif self._vocabulary is not None:
            batch.input_ids.clamp_(max=self._num_common - 1)
        return batch

    def _run(self, rows: SequenceRows, handles: list[tuple[Any, int]], states: Tensor | None) -> PassOutput:
        batch = build_batch(rows, self._model, self._kv, self._prepare_adapters(handles))
        hidden = self._model.forward(self._known(batch)).hidden
        return PassOutput(*rows.last_of(hidden))

    def _compute(self, batch: ForwardBatch, inputs: PassInputs) -> tuple[Tensor, ...]:
        """Compute a `PassOutput` of all rows, in a graph."""
        hidden = self._model.forward(self._known(batch)).hidden.index_select(0, inputs.last)
        logits = self._model.compute_logits(hidden, out=self._logits[: len(hidden)])
        return hidden, logits, most_likely_ids(self._common(logits), self._vocabulary)
