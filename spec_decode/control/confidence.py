"""Confidence: the number of a row's drafts that are worth verifying, decided after they were made.

    chance_j = expit(a + b logit(confidence_j) + c j / 8)       that draft j is right if those before it are
    s_j      = chance_1 ... chance_j

Each adapter has a, b and c for each drafter. They start at 0, 1, 0 (the drafter is trusted) and are fitted to verified
drafts by logistic regression: an approximate Newton step, with a diagonal Hessian, for each draft.

The first drafts of a row are kept, up to the first one that costs more than it gains: the rule of `goodput`, with the
price of a draft that was fixed before any draft was made. Of prompt lookup's, which are not drawn, as many are kept as
gain most together: the first one pays the whole jump from a step without drafts.

The distribution of the text is exact for sampled requests too, although they are verified by rejection sampling.
Whether draft j is verified depends on the drafts before it, which are verified then, and on nothing that is known
later: `Drafts.confidence` is made before draft j is drawn, and neither the price nor another row's drafts count. So a
draft that is left out might as well never have been drawn. A rule that looked at the draft itself would leave out
unlikely tokens more often, and the text would lack them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .goodput import DraftPrice

_FIRST_WEIGHTS = (0.0, 1.0, 0.0)
"""a, b and c before any draft was verified."""
_PRIOR = (4.0, 8.0, 4.0)
"""Their weights, in units of the Hessian's diagonal: a draft adds at most a quarter of its squared feature."""
_FADE = 1.0 - 1.0 / 512
"""Factor of the Hessian for each verified draft, so that the fit follows a change of the text within some hundreds."""
_DAMPING = 0.5
"""Factor of each step: the features are correlated, which a diagonal Hessian ignores."""
_LEAST = 1e-3
"""Bound of confidences from 0 and from 1."""
_LAST_POSITION = 8
"""Positions from this one on count alike."""


class ConfidenceFit:
    """The fit of one adapter and drafter."""

    __slots__ = ("_curvature", "_weights")

    def __init__(self) -> None:
        self._weights = [*_FIRST_WEIGHTS]
        self._curvature = [*_PRIOR]

    def chance(self, confidence: float, position: int) -> float:
        """Probability that the draft at a position, counted from 0, is right if those before it are."""
        a, b, c = self._weights
        return _expit(a + b * _log_odds(confidence) + c * min(position, _LAST_POSITION) / _LAST_POSITION)

    def add_round(self, confidence: Sequence[float], num_accepted: int) -> None:
        """Learn from the verified drafts of one round, of which the first `num_accepted` were right."""
        weights, curvature = self._weights, self._curvature
        for position, own in enumerate(confidence[: num_accepted + 1]):
            chance = self.chance(own, position)
            error, spread = (position < num_accepted) - chance, chance * (1.0 - chance)
            features = 1.0, _log_odds(own), min(position, _LAST_POSITION) / _LAST_POSITION
            for index, feature in enumerate(features):
                faded = max(_PRIOR[index], _FADE * curvature[index])
                curvature[index] = faded + spread * feature * feature
                weights[index] += _DAMPING * error * feature / curvature[index]

    def num_worthwhile(self, confidence: Sequence[float], price: DraftPrice, *, is_certain: bool = False) -> int:
        """Number of a row's first drafts that are worth their price. `is_certain`: see `num_best`."""
        if is_certain:
            return self.num_best(confidence, price)
        survival, tokens = 1.0, 1.0
        for position, own in enumerate(confidence):
            survival *= self.chance(own, position)
            if survival < price.least * (tokens if price.is_fair else 1.0):
                return position
            tokens += survival
        return len(confidence)

    def num_best(self, confidence: Sequence[float], price: DraftPrice) -> int:
        """Number of a row's first drafts that are worth their price together, for drafts that were not drawn: the text
        before them determines all of them, and so how many are worth the jump of the step's time."""
        best, most_worth = 0, 0.0
        survival, tokens, cost = 1.0, 1.0, 0.0
        for position, own in enumerate(confidence):
            survival *= self.chance(own, position)
            tokens += survival
            own_price = price.further if position else price.first
            cost += math.log1p(own_price) if price.is_fair else own_price
            worth = (math.log(tokens) if price.is_fair else tokens - 1.0) - cost
            if worth > most_worth:
                best, most_worth = position + 1, worth
        return best


def _log_odds(confidence: float) -> float:
    bounded = min(max(confidence, _LEAST), 1.0 - _LEAST)
    return math.log(bounded / (1.0 - bounded))


def _expit(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -500.0 else 0.0
