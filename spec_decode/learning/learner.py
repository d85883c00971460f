"""Learner: the tenants' draft weights, when they are trained, published, and dropped again."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...platform.core.learn_config import LearnConfig
from ...platform.core.messages import LearningEntry
from ...platform.core.request import Request, Status
from .head_trainer import DraftLora, HeadTrainer, ModuleWeights
from .traffic import WINDOW, Traffic

if TYPE_CHECKING:
    from ..drafters.base import DraftRow, Proposal
    from ..drafters.eagle.hidden_store import HiddenStore

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.02
"""Wanted bound of a slice, in seconds: about a step of SmolLM2-135M on two cores. A longer one halves the next."""
_LEAST_LABELS = 8
"""Fewest labels of a slice."""
ROUND_LABELS = 256
"""New labels after which a round of training begins: a few answers."""
_EPOCHS = 12
"""Labels that a round trains for each new one. With 4 a tiny model took twice as many requests to recover."""
JUDGED_STEPS = 64
"""Verifications after which a new version is judged."""
_TOLERANCE = 0.05
"""Loss of acceptance of the first draft beyond which a version is dropped."""
_MOST_CREDIT = 1.0
"""Most seconds of training that idle time saves up."""


class Version(Protocol):
    """Learnt weights on the device; see `LearntWeights`."""

    @property
    def digest(self) -> bytes:
        """Digest of the content."""
        ...

    @property
    def weights(self) -> ModuleWeights:
        """The content."""
        ...


class WeightRows(Protocol):
    """The device's rows of learnt weights; see `LearntRows`."""

    def write(self, slot: int, weights: ModuleWeights) -> Version:
        """Write weights to a slot, while no step runs."""
        ...


@dataclass(slots=True)
class Acceptance:
    """Acceptance of the first draft of a verification."""

    num_steps: int = 0
    num_accepted: int = 0

    @property
    def rate(self) -> float:
        """Share of verifications that accepted it."""
        return self.num_accepted / max(1, self.num_steps)


@dataclass(slots=True)
class _Owner:
    """One tenant, salt and adapter."""

    adapter: str
    """Its name in the first request."""
    tenant: str
    slot: int
    own: ModuleWeights
    """The adapter's own draft weights."""
    traffic: Traffic
    lora: DraftLora
    version: Version | None = None
    """Weights in use; None: the adapter's own."""
    fallback: Version | None = None
    """Weights that return if `version` is dropped."""
    baseline: float | None = None
    """Acceptance under `fallback`; None: `version` is kept."""
    before: float | None = None
    """The same, for as long as `version` is in use."""
    measured: Acceptance = field(default_factory=Acceptance)
    """Acceptance of drafts that were made with `version`."""
    new_labels: int = 0
    """Labels recorded since the last round began."""
    labels_left: int = 0
    """Labels that the round still trains."""
    trains: bool = False
    """True in a round, until its weights are published."""
    failed: bool = False
    """True when training failed. Its weights stay in use, and nothing more is recorded."""
    num_versions: int = 0
    num_dropped: int = 0


class Learner:
    """Records the traffic of tenants that opted in, and trains. One thread calls it: the one that runs steps."""

    def __init__(
        self,
        config: LearnConfig,
        trainer: HeadTrainer,
        rows: WeightRows,
        own_weights: Callable[[bytes], ModuleWeights | None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`own_weights`: draft weights of the adapter with this digest; None if it is gone."""
        self._config, self._trainer, self._rows, self._own_weights = config, trainer, rows, own_weights
        self._clock = clock
        self._owners: OrderedDict[tuple[bytes, bytes], _Owner] = OrderedDict()  # least recently used first
        self._free_slots = list(range(config.max_learners))
        self._drafted: dict[str, Version | None] = {}  # version that made the drafts of a request in flight
        self._random = Random(0)
        self._num_labels = WINDOW
        self._credit, self._credited = 0.0, clock()
        self.longest_slice = 0.0
        """Seconds of the longest slice so far."""

    @property
    def max_running(self) -> int:
        """Most running requests alongside which it trains."""
        return self._config.max_running

    # --- the drafter's calls ---

    def weights(self, request: Request) -> Any:
        """Learnt weights of the request's tenant and adapter, else its adapter."""
        owner = self._owners.get(request.text_namespace)
        return request.adapter if owner is None or owner.version is None else owner.version

    def observe(self, rows: Sequence[DraftRow], store: HiddenStore) -> None:
        """Record a step: the outcome of drafts, and the text of requests that ended."""
        for row in rows:
            request = row.request
            if request.tenant not in self._config.tenants:
                continue
            self._count(row)
            if request.status is Status.FINISHED and request.params.max_drafts != 0:
                try:
                    self._record(row, store)
                except Exception:
                    self._fail(request.text_namespace, request.tenant)

    def drafted(self, rows: Sequence[DraftRow], proposals: Sequence[Proposal]) -> None:
        """Record which version made the drafts of each row."""
        for row, proposal in zip(rows, proposals, strict=True):
            if row.request.tenant in self._config.tenants and len(proposal.drafts.token_ids):
                if len(self._drafted) > 4096:  # of requests that were aborted
                    self._drafted.clear()
                owner = self._owners.get(row.request.text_namespace)
                self._drafted[row.request.request_id] = None if owner is None else owner.version

    def forget(self, digest: bytes) -> None:
        """Drop everything of an adapter's content."""
        for key in [key for key in self._owners if key[1] == digest]:
            self._free_slots.append(self._owners.pop(key).slot)

    def _count(self, row: DraftRow) -> None:
        if row.request.request_id not in self._drafted:
            return
        version = self._drafted.pop(row.request.request_id)
        owner = self._owners.get(row.request.text_namespace)
        if owner is None or not row.num_drafts or version is not owner.version:
            return
        owner.measured.num_steps += 1
        owner.measured.num_accepted += row.num_accepted > 0
        if owner.baseline is not None and owner.measured.num_steps >= JUDGED_STEPS:
            self._judge(owner)

    def _record(self, row: DraftRow, store: HiddenStore) -> None:
        request = row.request
        if row.num_valid <= request.num_prompt_tokens:  # it was aborted in its prompt, or generates nothing
            return
        owner = self._owner(request)
        if owner is None or owner.failed:
            return
        first = max(0, request.num_prompt_tokens - WINDOW)
        states = store.read([row.block_table], [first], [row.num_valid - first])
        with torch.inference_mode(False):
            ids = torch.tensor(row.tokens[first : row.num_valid])
            owner.new_labels += owner.traffic.add(ids, states, request.num_prompt_tokens - first)

    def _owner(self, request: Request) -> _Owner | None:
        """The owner of a request's text, the least recently used one replaced; None if its weights cannot be
        trained."""
        key = request.text_namespace
        if key in self._owners:
            self._owners.move_to_end(key)
            return self._owners[key]
        own = self._own_weights(key[1])
        if own is None or not self._trainer.fits(own):
            return None
        lora = self._trainer.start(own)
        if not self._free_slots:
            self._free_slots.append(self._owners.popitem(last=False)[1].slot)
        name = "" if request.lora is None else request.lora.label
        buffer = Traffic(self._config.buffer_bytes)
        owner = _Owner(name, request.tenant, self._free_slots.pop(), own, buffer, lora)
        self._owners[key] = owner
        return owner

    def _fail(self, key: tuple[bytes, bytes], tenant: str) -> None:
        """Log the exception in flight, and train this owner no more: steps, and other owners, continue."""
        logger.exception("Draft weights of tenant %r are trained no more: training failed", tenant)
        owner = self._owners.get(key)
        if owner is not None:
            owner.failed, owner.trains, owner.new_labels = True, False, 0
            owner.traffic = Traffic(0)

    # --- training ---

    def work(self) -> float | None:
        """Train for one slice, if the share of time allows it.

        Returns:
            Seconds until the next slice may start; None: there is nothing to train.
        """
        found = self._next()
        if found is None:
            return None
        share, now = self._config.share, self._clock()
        self._credit = min(_MOST_CREDIT, self._credit + share * (now - self._credited))
        self._credited = now
        if self._credit < 0:
            return -self._credit / share
        key, owner = found
        try:
            self._train(owner)
        except Exception:
            self._fail(key, owner.tenant)
        self._account(self._clock() - now)
        return max(0.0, -self._credit / share)

    def _train(self, owner: _Owner) -> None:
        """Train one slice, or publish the weights of a round that has ended."""
        if owner.labels_left > 0 and owner.traffic.samples:
            sample = owner.traffic.choose(self._random).piece(self._num_labels, self._random)
            owner.labels_left -= sample.num_labels
            self._trainer.step(owner.lora, sample)
        else:
            self._publish(owner)

    def _account(self, seconds: float) -> None:
        """Charge a slice, and choose the size of the next."""
        self._credit -= seconds
        self.longest_slice = max(self.longest_slice, seconds)
        if seconds > SLICE_SECONDS:
            self._num_labels = max(_LEAST_LABELS, self._num_labels // 2)
        elif seconds < SLICE_SECONDS / 3:
            self._num_labels = min(WINDOW, 2 * self._num_labels)

    def _next(self) -> tuple[tuple[bytes, bytes], _Owner] | None:
        """An owner in a round of training, else one with enough new text for a round; and its key."""
        for key, owner in self._owners.items():
            if owner.trains:
                return key, owner
        for key, owner in self._owners.items():
            if owner.new_labels >= ROUND_LABELS and owner.traffic.samples:
                owner.labels_left = _EPOCHS * min(owner.new_labels, owner.traffic.num_labels)
                owner.trains, owner.new_labels = True, 0
                return key, owner
        return None

    def _publish(self, owner: _Owner) -> None:
        """Make the trained weights the version in use. An unjudged one is replaced; its fallback stays."""
        owner.trains, weights = False, owner.lora.weights()
        if not all(bool(part.isfinite().all()) for pair in weights.values() for part in pair):
            owner.lora = self._trainer.start(owner.own if owner.version is None else owner.version.weights)
            return
        if owner.baseline is None or owner.measured.num_steps >= JUDGED_STEPS:
            enough = owner.measured.num_steps >= JUDGED_STEPS
            owner.fallback, owner.baseline = owner.version, owner.measured.rate if enough else None
            owner.before = owner.baseline
        owner.version = self._rows.write(owner.slot, weights)
        owner.measured = Acceptance()
        owner.num_versions += 1
        logger.info("Draft weights %s learnt for tenant %r", owner.version.digest.hex()[:12], owner.tenant)

    def _judge(self, owner: _Owner) -> None:
        """Drop the version in use if fewer drafts are accepted than before."""
        baseline, owner.baseline = owner.baseline, None
        rate = owner.measured.rate
        if baseline is None or owner.version is None or rate >= baseline - _TOLERANCE:
            return
        dropped, back = owner.version, owner.fallback
        owner.version = None if back is None else self._rows.write(owner.slot, back.weights)
        owner.lora = self._trainer.start(owner.own if back is None else back.weights)
        owner.trains, owner.new_labels, owner.measured, owner.before = False, 0, Acceptance(), None
        owner.num_dropped += 1
        logger.info(
            "Draft weights %s of tenant %r dropped: acceptance fell from %.2f to %.2f",
            *(dropped.digest.hex()[:12], owner.tenant, baseline, rate),
        )

    def states(self) -> list[LearningEntry]:
        """State of each tenant and adapter, least recently used first."""
        return [
            LearningEntry(
                owner.adapter,
                owner.tenant,
                "" if owner.version is None else owner.version.digest.hex(),
                owner.num_versions,
                owner.num_dropped,
                owner.measured.rate,
                owner.before,
                owner.traffic.num_bytes,
                owner.failed,
            )
            for owner in self._owners.values()
        ]
