"""Noise, filters, statistics and log-probabilities in Triton against plain torch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from outrider.kernels.noise import Stream, gumbel_argmax, row_keys
from outrider.kernels.noise import torch as noise_reference
from outrider.kernels.noise import triton as noise
from outrider.kernels.sampling import filter_logits
from outrider.kernels.sampling import torch as reference
from outrider.kernels.sampling import triton as filters
from outrider.kernels.sampling import triton_logprobs as logprobs

from .noise_cases import HARD_HASHES, key_of_hash

INF, NAN = float("inf"), float("nan")
TAILS = [1, 33, 1000, 4097]


def some_keys(device: str, count: int, first: int = 0) -> torch.Tensor:
    return row_keys([7] * count, range(first, first + count), Stream.TARGET).to(device)


def defined_noise(bits: torch.Tensor) -> np.ndarray:
    """G of hashes by numpy: each logarithm in float64, nudged, rounded to float32 once."""
    h = bits.cpu().numpy().view(np.uint32).astype(np.float32)
    v = np.minimum((h + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    exponential = (-np.log1p(-v.astype(np.float64)) * noise_reference.NUDGE).astype(np.float32)
    return -(np.log(exponential.astype(np.float64)) * noise_reference.NUDGE).astype(np.float32)


# --- noise ---------------------------------------------------------------------------------------------------


@triton.jit
def noise_kernel(keys, bits_out, noise_out, num_tokens, BLOCK: tl.constexpr):
    """Hashes and noise [R, num_tokens] in memory, which the product's kernels keep in registers."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = noise.token_bits(tl.load(keys + row).to(tl.uint64), tokens)
    place = row * num_tokens + tokens
    tl.store(bits_out + place, bits.to(tl.int32, bitcast=True), mask=tokens < num_tokens)
    tl.store(noise_out + place, -noise.log_exponential(bits), mask=tokens < num_tokens)


def materialised(keys: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hashes int32, noise float32), [R, num_tokens] each, by the functions of the product's kernels."""
    bits = torch.empty(len(keys), num_tokens, dtype=torch.int32, device=keys.device)
    values = torch.empty(len(keys), num_tokens, dtype=torch.float32, device=keys.device)
    noise_kernel[(len(keys), triton.cdiv(num_tokens, 1024))](keys, bits, values, num_tokens, BLOCK=1024)
    return bits, values


@pytest.mark.parametrize("num_tokens", TAILS)
def test_hashes_are_the_cpus_bit_for_bit(device: str, num_tokens: int) -> None:
    keys = torch.cat([row_keys([1, -5], [2**31, 3], Stream.DRAFT), torch.tensor([0, -1, 2**63 - 1, -(2**63)])])
    want = noise_reference.hash_bits(keys, num_tokens)
    assert torch.equal(materialised(keys.to(device), num_tokens)[0].cpu(), want)


def test_noise_is_the_cpus_bit_for_bit(device: str) -> None:
    keys = some_keys("cpu", 8)
    got = materialised(keys.to(device), 40_001)[1].cpu()
    assert torch.equal(got, noise_reference.gumbel(keys, 40_001))
    assert np.array_equal(got.numpy(), defined_noise(noise_reference.hash_bits(keys, 40_001)))


@pytest.mark.parametrize("h", HARD_HASHES)
def test_hashes_next_to_a_rounding_boundary(device: str, h: int) -> None:
    """The hashes for which a logarithm's last bits come nearest to deciding."""
    keys = torch.tensor([key_of_hash(h)])
    bits, values = materialised(keys.to(device), 1)
    assert bits.item() == h
    assert values.item() == noise_reference.gumbel(keys, 1).item()


@pytest.mark.parametrize("num_tokens", TAILS)
def test_argmax_of_noise_is_that_of_the_materialised_sum(device: str, num_tokens: int) -> None:
    """Tiles are skipped, and most sums are never computed exactly; the result must be as if all were."""
    scores = torch.randn(7, num_tokens, device=device) * 3
    scores[1] = 0.0
    scores[2] = scores[2].round() * 1e4
    scores[3, : num_tokens - 1] = -INF
    scores[4] = -INF
    keys = some_keys(device, 7)
    got = noise.gumbel_argmax(scores, keys)
    assert torch.equal(got, (scores + materialised(keys, num_tokens)[1]).argmax(-1))
    assert got[3] == num_tokens - 1
    assert got[4] == 0
    assert torch.equal(got.cpu(), noise_reference.gumbel_argmax(scores.cpu(), keys.cpu()))
    assert torch.equal(got.cpu(), gumbel_argmax(scores.cpu(), keys.cpu()))  # C++, if there is a compiler


def test_argmax_with_nan_and_infinity(device: str) -> None:
    scores = torch.zeros(3, 2500, device=device)
    scores[0, [700, 2400]] = NAN
    scores[1, [1500, 2400]] = INF
    scores[2, 100], scores[2, 2000] = INF, NAN
    assert noise.gumbel_argmax(scores, some_keys(device, 3)).tolist() == [700, 1500, 2000]


def test_the_bounds_that_skip_tiles_hold(device: str) -> None:
    """No G is above the largest, at the smallest hash, and a skipped tile's sums are far enough below the best."""
    assert defined_noise(torch.tensor([0], dtype=torch.int32))[0] < noise._LARGEST_NOISE.value
    # Rows in which one token leads by a margin around the largest noise: the skip is decided either way.
    for lead in (22.0, 22.8, 23.0, 30.0):
        scores = torch.zeros(4, 3000, device=device)
        scores[:, 10] = lead
        keys = some_keys(device, 4, first=int(lead * 10))
        assert torch.equal(noise.gumbel_argmax(scores, keys), (scores + materialised(keys, 3000)[1]).argmax(-1))


def test_strided_rows_and_expanded_scores(device: str) -> None:
    scores = torch.randn(6, 80, device=device)
    keys = some_keys(device, 3)
    assert torch.equal(noise.gumbel_argmax(scores[::2], keys), noise.gumbel_argmax(scores[::2].clone(), keys))
    wide = torch.zeros(1, 1, device=device).expand(3, 70)
    assert torch.equal(noise.gumbel_argmax(wide, keys), materialised(keys, 70)[1].argmax(-1))


# --- filters -------------------------------------------------------------------------------------------------

CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (50.0, 0, 0.95, 0.0),
    (1.3, 30, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.5, 20, 0.7, 0.02),
    (1.0, 0, 0.6, 0.05),
    (1.0, 10**6, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
]
FEW_CASES = [(1.0, 20, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.3, 30, 0.7, 0.02), (0.0, 3, 0.5, 0.5)]


def filtered(logits: torch.Tensor, cases: Sequence[tuple[float, int, float, float]], device: str) -> torch.Tensor:
    """By the kernel, with limits as the package hands them down."""
    heat, k, p, m = (np.array(column) for column in zip(*cases, strict=True))
    sampled = heat >= 1e-5
    limits = reference.Limits(
        top_k=np.where(sampled & (k > 0) & (k < logits.shape[1]), k, 0),
        top_p=np.where(sampled, p, 1.0),
        min_p=np.where(sampled, m, 0.0),
    )
    kept = logits.clone()
    got = filters.filter_logits(logits.to(device), np.where(sampled, heat, 1.0), limits).cpu()
    assert torch.equal(logits, kept) or logits.isnan().any()
    return got


def expected(logits: torch.Tensor, cases: Sequence[tuple[float, int, float, float]]) -> torch.Tensor:
    """By the reference, every row alone: what it does with a row that is not finite may depend on its batch."""
    rows = [filter_logits(row[None], *([value] for value in case)) for row, case in zip(logits, cases, strict=True)]
    return torch.cat(rows)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(nan=0.5), want.nan_to_num(nan=0.5))


@pytest.mark.parametrize("kind", ["random", "ties", "constant"])
@pytest.mark.parametrize("num_tokens", TAILS)
def test_filters_keep_what_the_reference_keeps(device: str, num_tokens: int, kind: str) -> None:
    cases = CASES if (kind, num_tokens) == ("ties", 1000) else FEW_CASES
    logits = torch.randn(len(cases), num_tokens) * 3
    if kind == "ties":
        logits = logits.round()
        logits[:, ::3] *= 0.0  # zeros of both signs are equal
    elif kind == "constant":
        logits[:] = 1.5
    logits[:, num_tokens // 2 : num_tokens // 2 + 3] = -INF if num_tokens > 3 else 0.0
    assert_same(filtered(logits, cases, device), expected(logits, cases))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_that_are_not_finite(device: str, bad: float) -> None:
    cases = [*FEW_CASES, (1.0, 1, 1.0, 0.0), (1.0, 0, 1.0, 0.1)]
    logits = torch.randn(len(cases), 200)
    logits[:, [4, 70]] = bad
    if bad == -INF:
        logits[:] = bad
    assert_same(filtered(logits, cases, device), expected(logits, cases))


def test_rows_whose_candidates_do_not_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lanes and no room: the thresholds are searched for in the row itself."""
    monkeypatch.setattr(filters, "DEFAULT", replace(filters.DEFAULT, block=32, depth=1))
    logits = torch.randn(len(FEW_CASES), 150).mul_(2).round_()
    assert_same(filtered(logits, FEW_CASES, device), expected(logits, FEW_CASES))


def inside_a_token(logits: torch.Tensor, p: float) -> float:
    """The middle of the token at which the probabilities of the likeliest, added up, pass `p`. A bound next to where a
    token begins or ends is no test: float32 and the reference's float64 may choose differently there."""
    ends = logits.double().softmax(-1).sort(descending=True).values.cumsum(0)
    place = int(torch.searchsorted(ends, p))
    return float(ends[max(place - 1, 0) : place + 1].mean()) if place else float(ends[0]) / 2


@pytest.mark.parametrize("heat", [0.02, 1.0, 30.0, 1e4])
def test_nuclei_of_any_size(device: str, heat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room, so that several passes look for the end of a nucleus; of some the logits are all but equal."""
    monkeypatch.setattr(filters, "DEFAULT", replace(filters.DEFAULT, block=64))
    logits = torch.randn(5, 699)
    logits[4].clamp_(max=0.5)
    bounds = zip(logits, (0.999, 0.9, 0.01, 0.5, 0.3), (0.0, 0.01, 0.0, 0.0, 0.0), strict=True)
    cases = [(heat, 0, inside_a_token(row / heat, p), m) for row, p, m in bounds]
    assert_same(filtered(logits, cases, device), expected(logits, cases))


def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    logits = torch.randn(len(FEW_CASES), 500) * 4
    together = filtered(logits, FEW_CASES, device)
    for row, case in enumerate(FEW_CASES):
        assert torch.equal(filtered(logits[row : row + 1], [case], device)[0], together[row])


# --- statistics and log-probabilities ------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", TAILS)
def test_row_statistics(device: str, num_tokens: int) -> None:
    logits = torch.randn(5, num_tokens) * 3
    logits[1] = -INF
    logits[2, num_tokens // 2] = NAN
    logits[3, 1:] = -INF
    top, total = (part.cpu() for part in logprobs.row_stats(logits.to(device)))
    want_top, want_total = reference.row_stats(logits)
    assert torch.equal(top.nan_to_num(nan=7.0), want_top.nan_to_num(nan=7.0))
    assert top[2].isnan()
    assert total[2].isnan()
    assert total[1] == 0.0
    assert torch.allclose(total[[0, 3, 4]], want_total[[0, 3, 4]], rtol=1e-6)
    alone = logprobs.row_stats(logits[4:].to(device))
    assert alone[1].item() == total[4].item()


@pytest.mark.parametrize(("num_tokens", "k"), [(33, 0), (33, 33), (1000, 1), (4097, 7)])
def test_logprobs_are_the_references(device: str, num_tokens: int, k: int) -> None:
    logits = torch.randn(4, num_tokens) * 2
    logits[1, ::2] = -INF
    logits[2] = logits[2].round()
    chosen = torch.tensor([0, 1, num_tokens - 1, 5])
    ids, values, own, rank = (p.cpu() for p in logprobs.top_logprobs(logits.to(device), chosen.to(device), k))
    log_p = logits.double().log_softmax(-1)
    # A stable sort: lower ids first among equals.
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :k])
    assert torch.allclose(values.double(), log_p.gather(1, ids), atol=2e-5)
    assert torch.allclose(own.double(), log_p.gather(1, chosen[:, None])[:, 0], atol=2e-5)
    assert torch.equal(rank, (logits > logits.gather(1, chosen[:, None])).sum(-1) + 1)


def test_logprobs_of_rows_without_probabilities(device: str) -> None:
    logits = torch.randn(3, 100)
    logits[0, 50], logits[1] = NAN, -INF
    chosen = torch.tensor([3, 4, 5])
    ids, values, own, _ = (p.cpu() for p in logprobs.top_logprobs(logits.to(device), chosen.to(device), 4))
    assert own.isnan().tolist() == [True, True, False]
    assert values[:2].isnan().all()
    assert values[2].isfinite().all()
    assert ((ids >= 0) & (ids < 100)).all()


def test_logprobs_when_candidates_do_not_fit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "DEFAULT_LOGPROBS", replace(logprobs.DEFAULT_LOGPROBS, block=32, depth=1))
    logits = torch.randn(2, 150).mul_(2).round_()
    ids = logprobs.top_logprobs(logits.to(device), torch.tensor([0, 1], device=device), 20)[0].cpu()
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :20])
