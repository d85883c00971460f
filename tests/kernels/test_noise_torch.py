"""Counter-based noise: its bits against plain integers, its distribution, and that rows do not see each other."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.kernels.native import library
from outrider.kernels.noise import Stream, device_row_keys, gumbel_argmax, row_keys, uniform
from outrider.kernels.noise import native as noise_native
from outrider.kernels.noise import torch as reference
from outrider.kernels.noise.torch import (
    _FAST_ERROR,
    _TILE_CPU,
    NUDGE,
    _fast_log_exponential,
    gumbel,
    hash_bits,
    log_exponential,
)

from .noise_cases import HARD_HASHES, key_of_hash

MASK64 = (1 << 64) - 1
WIDE = _TILE_CPU + 1003  # a row that does not fit a tile, with a tail


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def reference_key(seed: int, position: int, stream: int) -> int:
    return splitmix64(splitmix64((seed & MASK64) ^ splitmix64(stream)) ^ position)


def reference_bits(keys: list[int], num_tokens: int) -> np.ndarray:
    """The same hash with unsigned numpy integers."""

    def rounds(x: np.ndarray, between: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ between) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    tokens = rounds(np.arange(num_tokens, dtype=np.uint32), np.uint32(0))
    low = np.array([key & 0xFFFFFFFF for key in keys], dtype=np.uint32)[:, None]
    high = np.array([key >> 32 for key in keys], dtype=np.uint32)[:, None]
    return rounds(tokens[None] ^ low, high)


def some_keys(count: int, stream: Stream = Stream.TARGET, seed: int = 7, first: int = 0) -> torch.Tensor:
    return row_keys([seed] * count, range(first, first + count), stream)


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of Pearson's test."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("stream", list(Stream))
def test_row_keys_are_the_reference(stream: Stream) -> None:
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, 2**64 - 1, 0x123456789ABCDEF]
    positions = [0, 1, 2, 5, 4096, 2**31, 131071]
    got = row_keys(seeds, positions, stream)
    assert got.dtype == torch.int64
    want = [reference_key(s, p, int(stream)) for s, p in zip(seeds, positions, strict=True)]
    assert [key & MASK64 for key in got.tolist()] == want
    assert torch.equal(device_row_keys(seeds, torch.tensor(positions), stream), got)


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (3, 5), (70, 4096), (2, WIDE)])
def test_bits_are_the_reference(num_rows: int, num_tokens: int) -> None:
    keys = some_keys(num_rows)
    got = hash_bits(keys, num_tokens).numpy().view(np.uint32)
    assert np.array_equal(got, reference_bits([k & MASK64 for k in keys.tolist()], num_tokens))


def test_bits_for_extreme_keys() -> None:
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0xFFFFFFFF, -(2**32)])
    got = hash_bits(keys, 300).numpy().view(np.uint32)
    assert np.array_equal(got, reference_bits([k & MASK64 for k in keys.tolist()], 300))


def test_gumbel_is_its_definition() -> None:
    keys = some_keys(64)
    bits = reference_bits([k & MASK64 for k in keys.tolist()], 1000).astype(np.float64)
    exponential = -np.log1p(-(bits + 0.5) * 2.0**-32)
    want = -np.log(exponential)
    error = np.abs(gumbel(keys, 1000).numpy() - want)
    # v is rounded by up to 2^-25 relatively, and dG/dv = exp(E) / E: that matters only if v is near 1, G near -2.5.
    assert (error < 2e-6 + 2.0**-24 * np.exp(exponential) / exponential * np.minimum(1, exponential)).all()
    assert error[want > 0.0].max() < 1e-6


def test_gumbel_is_finite_at_the_ends() -> None:
    bits = torch.tensor([0, 1, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    noise = -log_exponential(bits)
    assert torch.isfinite(noise).all()
    assert (noise.diff() <= 0).all(), "G falls as the unsigned h grows"
    assert noise[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert noise[-1].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("h", HARD_HASHES)
def test_the_last_bits_of_a_logarithm_do_not_count(h: int) -> None:
    """A library whose float64 logarithms are wrong by up to five units in the last place has the same noise."""
    bits = torch.tensor([h], dtype=torch.int32)
    v = float(np.float32(h) + np.float32(0.5)) * 2.0**-32
    want = log_exponential(bits).item()
    exact = -math.log1p(-v)
    rounded = float(np.float32(exact * NUDGE))
    for units in range(-5, 6):
        assert float(np.float32((exact + units * math.ulp(exact)) * NUDGE)) == rounded
        log = math.log(rounded)
        assert float(np.float32((log + units * math.ulp(log)) * NUDGE)) == want


def test_fast_noise_is_within_its_error_bound() -> None:
    bits = hash_bits(some_keys(20), 100_000)
    error = (_fast_log_exponential(bits) - log_exponential(bits)).abs().max()
    assert 0 < 2 * error < _FAST_ERROR


@pytest.mark.parametrize("num_tokens", [7, 4096, WIDE])
def test_noise_of_a_row_is_independent_of_the_others(num_tokens: int) -> None:
    keys = some_keys(37 if num_tokens < WIDE else 3)
    together = gumbel(keys, num_tokens)
    for row in (0, 1, len(keys) - 1):
        assert torch.equal(gumbel(keys[row : row + 1], num_tokens)[0], together[row])
    assert torch.equal(gumbel(keys.flip(0), num_tokens).flip(0), together)


def test_strided_keys() -> None:
    keys = some_keys(10)
    assert torch.equal(gumbel(keys[::2], 50), gumbel(keys, 50)[::2])


ARGMAX = {"torch": reference.gumbel_argmax, "native": noise_native.gumbel_argmax}


@pytest.fixture(params=list(ARGMAX))
def argmax(request: pytest.FixtureRequest) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Each of the CPU's."""
    if request.param == "native" and library() is None:
        pytest.skip("needs a C++ compiler")
    return ARGMAX[request.param]


Argmax = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 100.0])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 129, 4097])
def test_each_argmax_takes_the_exact_noise(argmax: Argmax, num_tokens: int, temperature: float) -> None:
    scores = torch.randn(64, num_tokens, generator=torch.Generator().manual_seed(num_tokens)) / temperature
    scores[::3] = scores[::3].round()
    scores[1::3, ::2] = -torch.inf
    keys = some_keys(64, first=num_tokens)
    assert torch.equal(argmax(scores, keys), (scores + gumbel(keys, num_tokens)).argmax(-1))


def test_each_argmax_decides_ties_exactly(argmax: Argmax) -> None:
    """Scores that make all sums nearly equal: only the exact noise, and then the lowest token, decides."""
    keys = some_keys(200)
    noise = gumbel(keys, 300)
    for scores in (-noise, 1e-6 * torch.randn(200, 300) - noise, 1e5 - noise):
        assert torch.equal(argmax(scores, keys), (scores + noise).argmax(-1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_each_argmax_with_scores_that_are_not_finite(argmax: Argmax, bad: float) -> None:
    scores = torch.randn(5, 1000)
    scores[0, [700, 900]] = bad
    scores[1] = bad
    scores[2, 999] = bad
    scores[3, 0] = bad
    scores[4, [10, 20, 600]] = torch.tensor([torch.inf, bad, torch.nan])
    keys = some_keys(5)
    got = argmax(scores, keys)
    assert torch.equal(got, (scores + gumbel(keys, 1000)).argmax(-1))


def test_each_argmax_with_strided_rows(argmax: Argmax) -> None:
    scores = torch.randn(12, 200)
    keys = some_keys(12)
    assert torch.equal(argmax(scores[::2, :77], keys[::2]), argmax(scores[::2, :77].clone(), keys[::2].clone()))


@pytest.mark.parametrize("h", HARD_HASHES)
def test_native_noise_of_the_hardest_hashes(h: int) -> None:
    """Two equal tokens but for their noise, and scores that make their sums equal: it must see the tie."""
    if library() is None:
        pytest.skip("needs a C++ compiler")
    keys = torch.tensor([key_of_hash(h)])
    noise = gumbel(keys, 2)
    assert noise[0, 0].item() == -log_exponential(torch.tensor([h], dtype=torch.int32)).item()
    lead = (noise[0, 0] - noise[0, 1]).item()
    for nearby in (lead, math.nextafter(lead, 99), math.nextafter(lead, -99)):
        for score in (nearby, float(np.float32(nearby)), float(np.nextafter(np.float32(nearby), np.float32(99)))):
            scores = torch.tensor([[0.0, score]])
            got = noise_native.gumbel_argmax(scores, keys)
            assert torch.equal(got, (scores + noise).argmax(-1))


def test_strided_columns_use_torch() -> None:
    assert noise_native.gumbel_argmax(torch.zeros(2, 20)[:, ::2], some_keys(2)) is None
    assert torch.equal(
        gumbel_argmax(torch.zeros(1, 1).expand(2, 20), some_keys(2)), gumbel(some_keys(2), 20).argmax(-1)
    )


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 3), (50, 4096), (3, WIDE)])
def test_gumbel_argmax_is_the_argmax_of_the_sum(num_rows: int, num_tokens: int) -> None:
    scores = torch.randn(num_rows, num_tokens)
    scores[:, ::2] = -torch.inf
    scores[0, : num_tokens - 2] = -torch.inf  # the winner stands at the end: in the last tile of a wide row
    kept = scores.clone()
    keys = some_keys(num_rows)
    assert torch.equal(gumbel_argmax(scores, keys), (scores + gumbel(keys, num_tokens)).argmax(-1))
    assert torch.equal(scores, kept)


def test_no_rows() -> None:
    keys = row_keys([], [], Stream.TARGET)
    assert gumbel(keys, 5).shape == (0, 5)
    assert gumbel_argmax(torch.empty(0, 5), keys).shape == (0,)
    assert uniform(keys).shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="seed keys"):
        row_keys([1, 2], [1], Stream.TARGET)
    with pytest.raises(ValueError, match="int64"):
        gumbel_argmax(torch.zeros(3, 5), torch.zeros(3))
    with pytest.raises(ValueError, match="keys for"):
        gumbel_argmax(torch.zeros(2, 5), some_keys(3))


def test_uniform_is_its_definition_and_open() -> None:
    keys = torch.cat([some_keys(1000, Stream.ACCEPT), torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
    want = [(2 * ((k & MASK64) >> 41) + 1) / 2**24 for k in keys.tolist()]
    got = uniform(keys)
    assert got.tolist() == want
    assert 0.0 < got.min() < got.max() < 1.0


@pytest.mark.parametrize("vary", ["positions", "seeds", "tokens"])
def test_bits_are_uniform(vary: str) -> None:
    count = 1 << 16
    if vary == "tokens":
        bits = hash_bits(some_keys(1), count)[0]
    elif vary == "positions":
        bits = hash_bits(some_keys(count), 1)[:, 0]
    else:
        bits = hash_bits(row_keys(range(count), [3] * count, Stream.TARGET), 1)[:, 0]
    values = bits.numpy().view(np.uint32)
    for shift in (24, 12, 0):
        counts = np.bincount((values >> np.uint32(shift)) & np.uint32(0xFF), minlength=256)
        assert chi_square_p(counts, np.full(256, count / 256)) > 1e-4


def normal_scores(bits: torch.Tensor) -> torch.Tensor:
    values = torch.from_numpy(bits.numpy().view(np.uint32).astype(np.float64))
    return torch.special.ndtri((values + 0.5) * 2.0**-32)


def test_no_correlation_between_neighbours() -> None:
    """Positions, streams, seeds and tokens next to each other: a sample correlation has deviation 1/sqrt(n)."""
    rows, tokens = 120, 300
    base = normal_scores(hash_bits(some_keys(rows), tokens))
    others = {
        "next position": hash_bits(some_keys(rows, first=1), tokens),
        "far position": hash_bits(some_keys(rows, first=1 << 16), tokens),
        "next seed": hash_bits(some_keys(rows, seed=8), tokens),
        "seed with one more bit": hash_bits(some_keys(rows, seed=7 + 2**40), tokens),
        **{f"stream {s.name}": hash_bits(some_keys(rows, s), tokens) for s in Stream if s is not Stream.TARGET},
        "next token": hash_bits(some_keys(rows), tokens + 1)[:, 1:],
        "token with one more bit": hash_bits(some_keys(rows), tokens + 1024)[:, 1024:],
    }
    for name, bits in others.items():
        other = normal_scores(bits)
        correlation = (base * other).mean().item() * math.sqrt(rows * tokens)
        assert abs(correlation) < 4.5, name
        squares = ((base**2 - 1) * (other**2 - 1)).mean().item() / 2 * math.sqrt(rows * tokens)
        assert abs(squares) < 4.5, name


def test_row_means_are_independent_of_the_row() -> None:
    """No row is shifted as a whole: the variance of row means is 1/V."""
    scores = normal_scores(hash_bits(some_keys(1500), 256))
    assert (scores.mean(1).var() * 256).item() == pytest.approx(1.0, abs=4.5 * math.sqrt(2 / 1500))


@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_argmax_draws_from_p(vary: str) -> None:
    num_draws, p = 60_000, np.array([0.5, 0.2, 0.0, 0.15, 0.1, 0.04, 0.009, 0.001])
    keys = some_keys(num_draws) if vary == "positions" else row_keys(range(num_draws), [9] * num_draws, Stream.TARGET)
    scores = torch.from_numpy(np.log(np.maximum(p, 1e-300))).float().masked_fill(torch.tensor(p == 0), -torch.inf)
    counts = np.bincount(gumbel_argmax(scores.expand(num_draws, -1), keys).numpy(), minlength=len(p))
    assert counts[p == 0] == 0
    assert chi_square_p(counts[p > 0], p[p > 0] * num_draws) > 1e-4


def test_argmax_over_a_large_flat_vocabulary_is_uniform() -> None:
    num_draws, num_tokens = 600, 20_000
    drawn = gumbel_argmax(torch.zeros(1, 1).expand(num_draws, num_tokens), some_keys(num_draws)).numpy()
    counts = np.bincount(drawn * 20 // num_tokens, minlength=20)
    assert chi_square_p(counts, np.full(20, num_draws / 20)) > 1e-4
    assert len(np.unique(drawn)) > 0.85 * num_draws  # 1 - n/2V of them: no token is favoured
