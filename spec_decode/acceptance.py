"""Running estimates of which drafts are accepted.

For one drafter and one lane (an adapter's requests that are greedy, or not), `Rates` keeps for each draft position j

    p_j = P(draft j is accepted | drafts 0 .. j-1 were accepted, and there was a draft j)
    a_j = P(there is a draft j | one was asked for)            (n-gram finds no match, a lagging model is not ready)

as counts that forget exponentially. When the last few dozen first drafts fare so differently that chance does not
explain it, the text is another one: what is older is given up. A position that was hardly ever tried is thought to be
like the one before it:

    p_j = (accepted_j + w_j p_{j-1}) / (tried_j + w_j),    p_{-1} = the drafter's mean over all lanes of the kind

One request differs from its lane's mean by a factor m, estimated from its own drafts and shrunk towards 1:

    m = (s + accepted) / (s + expected),    expected = sum of p_j over the drafts of it that were tried

so that its chance of having drafts 0 .. j accepted is prod_{l <= j} min(m p_l, MAX). The number of drafts tried is
min(accepted + 1, drafts): those behind the first rejected one say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Prior(NamedTuple):
    """What is thought of every position before anything was proposed or verified."""

    probability: float
    available: float


HOPEFUL = Prior(0.7, 1.0)
"""Of the drafter that the user asked for: it is tried at once."""
FALLBACK = Prior(0.25, 0.4)
"""Of one that stands in for it: it is tried when the other does not pay, and by probes."""
MAX_PROBABILITY = 0.99
LANE_MEMORY = 200.0
"""Verified rows after which an adapter's evidence has faded by 1/e."""
REQUEST_MEMORY = 40.0
"""The same for one request, in tried drafts."""
_RECENT_FADE, _FEW_RECENT = 1.0 - 1.0 / 24.0, 6.0
_LARGE_CHANGE = 0.2
_PRIOR_WEIGHT, _POSITION_WEIGHT = 6.0, 3.0
_REQUEST_WEIGHT = 8.0
_REQUEST_FADE = 1.0 - 1.0 / REQUEST_MEMORY
Outcome = tuple[int, int]
"""Of the drafts of one row that were verified: how many there were, and how many were right."""


class Rates:
    """Estimates by draft position, for one drafter and one lane (or, as the prior, for all of its kind)."""

    __slots__ = (
        "_accepted",
        "_always",
        "_asked",
        "_available",
        "_fade",
        "_prior",
        "_prior_weight",
        "_probabilities",
        "_proposed",
        "_recent",
        "_stale",
        "_tried",
        "epoch",
        "num_tried",
    )

    def __init__(self, num_positions: int, prior: Rates | Prior, memory: float = LANE_MEMORY) -> None:
        """`prior`: what these start from."""
        self._tried = [0.0] * num_positions
        self._accepted = [0.0] * num_positions
        self._asked = [0.0] * num_positions
        self._proposed = [0.0] * num_positions
        self._fade = 1.0 - 1.0 / memory
        self._prior = prior
        self._prior_weight = _PRIOR_WEIGHT
        self._always = self.prior_available == 1.0  # never a draft too few so far: nothing to count
        self._recent = [0.0, 0.0]  # first drafts tried and accepted lately
        self.epoch = 0
        """Counts the changes of the text."""
        self.num_tried = 0
        """Counts the verified rows."""
        self._stale = True
        self._probabilities: list[float] = []
        self._available: list[float] | None = None

    @property
    def evidence(self) -> float:
        """Verified rows, faded."""
        return self._tried[0]

    def count_proposals(self, counts: Sequence[tuple[int, int]]) -> None:
        """(Number asked for, number proposed) of some requests, at least one."""
        if self._always and all(num_proposed >= num_asked for num_asked, num_proposed in counts):
            return
        self._always = False
        asked, proposed = self._asked, self._proposed
        keep, weight = _fading(self._fade, len(counts))
        num_positions = len(asked)
        last_asked, last_proposed = [0] * (num_positions + 1), [0] * (num_positions + 1)
        for num_asked, num_proposed in counts:
            last_asked[num_asked] += 1
            last_proposed[min(num_asked, num_proposed)] += 1
        more_asked = more_proposed = 0
        for j in range(num_positions - 1, -1, -1):
            more_asked += last_asked[j + 1]
            more_proposed += last_proposed[j + 1]
            if more_asked:
                asked[j] = asked[j] * keep + weight * more_asked
                proposed[j] = proposed[j] * keep + weight * more_proposed
        self._available = None

    def count(self, outcomes: Sequence[Outcome]) -> None:
        """Verified drafts. Of many at once, all count alike: it is not known which came last."""
        num_positions = len(self._tried)
        last_tried, last_accepted = [0] * (num_positions + 1), [0] * (num_positions + 1)
        for num_drafts, num_accepted in outcomes:
            last_tried[min(num_accepted + 1, num_drafts)] += 1
            last_accepted[num_accepted] += 1
        num_tried = num_accepted = 0
        for j in range(num_positions - 1, -1, -1):
            num_tried += last_tried[j + 1]
            num_accepted += last_accepted[j + 1]
            if num_tried:
                keep, weight = _fading(self._fade, num_tried)
                self._tried[j] = self._tried[j] * keep + weight * num_tried
                self._accepted[j] = self._accepted[j] * keep + weight * num_accepted
        self.num_tried += num_tried
        keep, weight = _fading(_RECENT_FADE, num_tried)
        tried, accepted = self._recent
        self._recent = [tried * keep + weight * num_tried, accepted * keep + weight * num_accepted]
        self._stale = True

    @property
    def probabilities(self) -> list[float]:
        """p_j [num_positions]. Not to be changed."""
        if self._stale:
            self._stale = False
            self._notice_change()
            prior = self._prior
            before = prior.probability if isinstance(prior, Prior) else prior.probabilities[0]
            found, weight = [], self._prior_weight
            for tried, accepted in zip(self._tried, self._accepted, strict=True):
                before = (accepted + weight * before) / (tried + weight)
                found.append(before)
                weight = _POSITION_WEIGHT
            self._probabilities = found
        return self._probabilities

    def look_again(self) -> None:
        """After a time without drafts: what was accepted before it says nothing of a change."""
        self._recent = [0.0, 0.0]

    def doubt(self) -> None:
        """What was tried last fared better than all before let expect: that counts for half as much now, and so does
        the mean over all adapters, which may be made of little else."""
        self._prior_weight = max(0.5 * self._prior_weight, 1.0)
        for counts in (self._tried, self._accepted):
            counts[:] = [count / 2 for count in counts]
        self._stale = True

    def trust(self) -> None:
        """What was tried last fared no better than expected: the mean over all adapters counts for more again."""
        if self._prior_weight < _PRIOR_WEIGHT:
            self._prior_weight = min(2.0 * self._prior_weight, _PRIOR_WEIGHT)
            self._stale = True

    @property
    def recent(self) -> float:
        """Share of the first drafts that were accepted lately."""
        return self._recent[1] / self._recent[0] if self._recent[0] else 0.0

    def _notice_change(self) -> None:
        tried, accepted = self._recent
        if tried < _FEW_RECENT or self._tried[0] < 2 * tried:
            return
        before = (self._accepted[0] + 1.0) / (self._tried[0] + 2.0)
        if abs(accepted / tried - before) > max(_LARGE_CHANGE, 2.5 * math.sqrt(before * (1.0 - before) / tried)):
            for counts in (self._tried, self._accepted, self._asked, self._proposed):
                counts[:] = [0.0] * len(counts)
            self._tried[0], self._accepted[0], self._available = tried, accepted, None
            self.epoch += 1

    @property
    def recent_probabilities(self) -> list[float]:
        """p_j as they were when last asked for: good enough to compare a request with, and free."""
        return self._probabilities or self.probabilities

    @property
    def prior_available(self) -> float:
        """P(there is a first draft) before anything was counted."""
        prior = self._prior
        return prior.available if isinstance(prior, Prior) else prior.available[0]

    @property
    def available(self) -> list[float]:
        """P(there are drafts 0 .. j | asked for) [num_positions], never rising. Not to be changed."""
        if self._available is None:
            before, rate = 1.0, self.prior_available
            found = []
            for asked, proposed in zip(self._asked, self._proposed, strict=True):
                rate = min(before, (proposed + _POSITION_WEIGHT * rate) / (asked + _POSITION_WEIGHT))
                found.append(rate)
                before = rate
            self._available = found
        return self._available

    @property
    def promise(self) -> float:
        """E[tokens of a step] with all drafts."""
        product, tokens = 1.0, 1.0
        for p, available in zip(self.probabilities, self.available, strict=True):
            product *= p
            tokens += available * product
        return tokens


def _fading(fade: float, count: int) -> tuple[float, float]:
    """What is left of older evidence after `count` times, and what each of these counts then, in the mean."""
    keep = fade**count
    return keep, (1.0 - keep) / ((1.0 - fade) * count) if count else 1.0


class RequestRates:
    """How one request differs from its adapter's mean, for one drafter."""

    __slots__ = ("_accepted", "_expected", "epoch")

    def __init__(self, epoch: int = 0) -> None:
        """`epoch`: that of the adapter's rates which it is compared with."""
        self.epoch = epoch
        self._accepted = 0.0
        self._expected = 0.0

    def count(self, probabilities: Sequence[float], outcomes: Sequence[Outcome]) -> None:
        """Take in verified drafts, with the adapter's estimate before them."""
        all_tried = all_accepted = 0
        expected = 0.0
        for num_drafts, num_accepted in outcomes:
            num_tried = min(num_accepted + 1, num_drafts)
            all_tried += num_tried
            all_accepted += num_accepted
            expected += sum(probabilities[:num_tried])
        keep, weight = _fading(_REQUEST_FADE, all_tried)
        self._accepted = self._accepted * keep + weight * all_accepted
        self._expected = self._expected * keep + weight * expected

    def fade(self, keep: float) -> None:
        """Forget a part: nothing was verified for a while."""
        self._accepted *= keep
        self._expected *= keep

    @property
    def factor(self) -> float:
        """m."""
        return (_REQUEST_WEIGHT + self._accepted) / (_REQUEST_WEIGHT + self._expected)


def cumulative(probabilities: Sequence[float], factor: float, num_drafts: int) -> list[float]:
    """P(drafts 0 .. j are all accepted | they are there) for j < num_drafts."""
    found, product = [], 1.0
    for p in probabilities[:num_drafts]:
        p *= factor
        product *= p if p < MAX_PROBABILITY else MAX_PROBABILITY
        found.append(product)
    return found
