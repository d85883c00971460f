"""`BeamSearch` over random chains of tokens: it may end early, and finds the same as a search to the last token."""

import math
import random

import pytest

from outrider.platform.client.beam_search import BeamSearch
from outrider.platform.core.beam_search import MAX_LENGTH_PENALTY, BeamSearchParams
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.messages import EngineRequest
from outrider.platform.core.outputs import Logprob
from outrider.platform.core.sampling_params import SamplingParams

NUM_TOKENS, END, MAX_TOKENS = 7, 0, 30
Chain = list[list[float]]


def chain(seed: int) -> Chain:
    """Log-probabilities of the next token after each token."""
    draw = random.Random(seed)
    rows = [[draw.expovariate(1.0) ** 2 for _ in range(NUM_TOKENS)] for _ in range(NUM_TOKENS)]
    return [[math.log(weight / sum(row)) for weight in row] for row in rows]


def late_winner() -> Chain:
    """After token 3 the end is likely, also after token 2; the unlikely token 1 repeats itself almost surely."""
    rows = [[1.0] * NUM_TOKENS for _ in range(NUM_TOKENS)]
    rows[3] = [60.0, 1.0, 39.0, *[1e-6] * 4]
    rows[2] = [95.0, 1e-6, 5.0, *[1e-6] * 4]
    rows[1] = [1e-6, 100.0, *[1e-6] * 5]
    return [[math.log(weight / sum(row)) for weight in row] for row in rows]


CHAINS = [*map(chain, range(40)), late_winner()]


def top(row: list[float], count: int) -> list[int]:
    return sorted(range(NUM_TOKENS), key=lambda token: -row[token])[:count]


def to_the_end(rows: Chain, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
    beams: list[tuple[float, float, list[int]]] = [(0.0, 0.0, prompt)]  # score, log-probability, tokens
    complete: list[tuple[float, float, list[int]]] = []
    for _ in range(params.max_tokens):
        longer = []
        for _, total, tokens in beams:
            row = rows[tokens[-1]]
            for token in top(row, 2 * params.beam_width):
                length = len(tokens) + (token != END)
                beam = ((total + row[token]) / length**params.length_penalty, total + row[token], [*tokens, token])
                (complete if token == END else longer).append(beam)
        beams = sorted(longer, key=lambda beam: beam[0], reverse=True)[: params.beam_width]
    best = sorted(complete + beams, key=lambda beam: beam[0], reverse=True)[: params.beam_width]
    return [tokens for _, _, tokens in best]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
def test_a_search_that_ends_early_misses_nothing(penalty: float) -> None:
    lengths = []
    for rows in CHAINS:
        params = BeamSearchParams(2, MAX_TOKENS, length_penalty=penalty)
        search = BeamSearch(EngineRequest("r", [3, 3], SamplingParams(), [END]), params)
        steps = 0
        while prompts := search.prompts():
            ids = [prompt["prompt_token_ids"] for prompt in prompts]  # type: ignore[call-overload, index]
            search.extend(
                [{token: Logprob(rows[beam[-1]][token], 1) for token in top(rows[beam[-1]], 4)} for beam in ids]
            )
            steps += 1
        found = search.result(str)
        assert [sequence.tokens for sequence in found.sequences] == to_the_end(rows, [3, 3], params)
        lengths.append(steps)
    assert min(lengths) < MAX_TOKENS or penalty > 1


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_scores_of_long_sequences_are_numbers(penalty: float) -> None:
    request = EngineRequest("r", [3] * 10**6, SamplingParams(), [END])
    search = BeamSearch(request, BeamSearchParams(1, 2, length_penalty=penalty))
    search.extend([{4: Logprob(-1.0, 1), 5: Logprob(-2.0, 2)}])
    assert search.prompts()
    assert search.result(str).sequences[0].tokens[-1] == 4


def test_penalties_beyond_the_limit() -> None:
    with pytest.raises(InvalidRequestError, match="length_penalty"):
        BeamSearchParams(1, 2, length_penalty=MAX_LENGTH_PENALTY + 1)
