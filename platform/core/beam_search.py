"""Parameters and results of beam search, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import invalid
from .lora_request import LoRA
from .outputs import Logprob
from .sampling_params import check_integer, check_number, quote_for_error

MAX_BEAM_WIDTH = 128
"""Largest `beam_width`, as of `n`. An engine's `max_logprobs` must be twice the width, too."""
MAX_LENGTH_PENALTY = 20.0
"""Bound of `length_penalty` in both directions. A million to this power is far from the bounds of a float."""


@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. Wrong values raise `InvalidRequestError` with the field in `param`."""

    beam_width: int
    """Number of sequences that each step keeps, and of the result: at most 128, and half of the engine's
    `max_logprobs`."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """No effect: sequences are ranked by the model's own log-probabilities, and nothing is sampled."""
    length_penalty: float = 1.0
    """Sequences are ranked by their log-probability over (number of tokens) ** length_penalty, from -20 to 20. As in
    vLLM prompt tokens count, and the end token does not."""
    include_stop_str_in_output: bool = False
    """Leave the end token in the text."""

    def with_max_tokens(self, max_tokens: int) -> BeamSearchParams:
        """Return these parameters for another number of tokens."""
        return replace(self, max_tokens=max_tokens)

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, f"must be true or false, got {quote_for_error(getattr(self, name))}")


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences that a search has found."""

    tokens: list[int]
    """Token ids, those of the prompt first."""
    logprobs: list[dict[int, Logprob]]
    """For each generated token the most likely ones at its position."""
    lora_request: LoRA | None = None
    cum_logprob: float = 0.0
    """Log-probability of all generated tokens."""
    text: str | None = None
    """Text of `tokens`, the prompt's too."""
    finish_reason: str | None = None
    """"stop" after an end token, else "length"."""
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Result of a search: `beam_width` sequences, the best first."""

    sequences: list[BeamSearchSequence]
