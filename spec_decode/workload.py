"""What requests have been like lately, as far as it says what drafting is worth."""

from __future__ import annotations

_MEMORY, _FEW_OUTPUTS = 4000.0, 200.0
"""Tokens of answers over which it is averaged, and those that it takes to say anything of prompts."""
_FEW_ACCEPTED = 40.0
"""Accepted drafts after which the share of them that was wasted counts half."""


class Workload:
    """Sums that forget exponentially."""

    __slots__ = ("_accepted", "_outputs", "_prompts", "_wasted")

    def __init__(self) -> None:
        self._prompts = self._outputs = 0.0  # tokens
        self._accepted = self._wasted = 0.0  # drafts

    def computed(self, prompt_tokens: int, output_tokens: int) -> None:
        """A step computed that many tokens of prompts, and brought that many of answers."""
        keep = max(0.0, 1.0 - output_tokens / _MEMORY)
        self._prompts = self._prompts * keep + prompt_tokens
        self._outputs = self._outputs * keep + output_tokens

    def finished(self, accepted: int, wasted: int) -> None:
        """A request has ended: so many drafts were accepted, and of the last ones so many came after its end."""
        keep = max(0.0, 1.0 - accepted / _MEMORY)
        self._accepted = self._accepted * keep + accepted
        self._wasted = self._wasted * keep + min(wasted, accepted)

    @property
    def prompts_per_token(self) -> float:
        """Prompt tokens for each token of an answer."""
        return self._prompts / self._outputs if self._outputs >= _FEW_OUTPUTS else 0.0

    @property
    def useful(self) -> float:
        """The share of accepted drafts that came before the end of their answer: less where answers are short."""
        return 1.0 - self._wasted / (self._accepted + _FEW_ACCEPTED)
