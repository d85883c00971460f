"""Sampling filters against a float64 reference that sorts, and row by row."""

import numpy as np
import pytest
import torch

from outrider.kernels import sampling as kernel_package
from outrider.kernels.sampling import filter_logits, logprobs_at, top_logprobs
from outrider.platform.core import sampling_params

INF = float("inf")


def reference_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens stay, from one row of logits divided by the temperature, in float64."""
    x = scaled.astype(np.float64)
    kept = x > -np.inf
    if min_p > 0:
        kept &= x >= x.max() + np.log(min_p) - 1e-9
    if 0 < top_k < len(x):
        kept &= x >= np.sort(np.where(kept, x, -np.inf))[::-1][top_k - 1]
    if top_p < 1:
        mass = np.where(kept, np.exp(x - x.max()), 0.0)
        mass /= mass.sum()
        order = np.argsort(-mass, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        inside = np.zeros_like(kept)
        inside[order[before < top_p]] = True
        kept &= inside
    return kept


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (3.0, 0, 0.99, 0.0),
    (50.0, 0, 0.95, 0.0),
    (1.3, 40, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.5, 20, 0.7, 0.02),
    (1.0, -1, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.0),
]


@pytest.mark.parametrize("num_tokens", [11, 997, 12000])
@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(case: tuple[float, int, float, float], num_tokens: int) -> None:
    temperature, top_k, top_p, min_p = case
    logits = torch.randn(4, num_tokens) * 3
    logits[1, ::3] = -INF
    got = filter_logits(logits, [temperature] * 4, [top_k] * 4, [top_p] * 4, [min_p] * 4).numpy()
    scaled = (logits / temperature).numpy()
    for row in range(4):
        kept = reference_kept(scaled[row], top_k, top_p, min_p)
        assert np.array_equal(got[row], np.where(kept, scaled[row], -np.inf))


def test_filters_are_independent_of_other_rows() -> None:
    logits = torch.randn(len(CASES) + 1, 3000) * 4
    parameters = [*CASES, (0.0, 3, 0.5, 0.5)]
    columns = [list(column) for column in zip(*parameters, strict=True)]
    together = filter_logits(logits, *columns)
    for row, parameter in enumerate(parameters):
        alone = filter_logits(logits[row : row + 1], *([value] for value in parameter))
        assert torch.equal(alone[0], together[row]), parameter


@pytest.mark.parametrize("case", CASES)
def test_input_is_not_changed(case: tuple[float, int, float, float]) -> None:
    logits = torch.randn(3, 500)
    kept = logits.clone()
    filter_logits(logits, *([value] * 3 for value in case))
    assert torch.equal(logits, kept)


def test_neutral_filters_do_not_copy() -> None:
    logits = torch.randn(2, 50)
    assert filter_logits(logits, [1.0, 0.0], [0, 5], [1.0, 0.3], [0.0, 0.9]) is logits


def test_greedy_rows_are_not_filtered() -> None:
    logits = torch.randn(3, 50)
    got = filter_logits(logits, [0.0, 0.8, 1e-6], [2, 2, 2], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    assert torch.equal(got[[0, 2]], logits[[0, 2]])
    assert 1 <= torch.isfinite(got[1]).sum() <= 2


def test_zero_mass_stays_zero() -> None:
    logits = torch.full((1, 1000), -INF)
    logits[0, [5, 17]] = torch.tensor([1.0, 0.5])
    for case in CASES:
        got = filter_logits(logits, *([value] for value in case))[0]
        assert set(torch.isfinite(got).nonzero().flatten().tolist()) <= {5, 17}
        assert torch.isfinite(got[5])


def test_ties_at_the_kth_logit_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert torch.isfinite(filter_logits(logits, [1.0], [2]))[0].tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("num_tokens", [4, 200, 3000])
def test_ties_at_the_end_of_the_nucleus_keep_the_lowest_ids(num_tokens: int) -> None:
    logits = torch.zeros(1, num_tokens)
    got = torch.isfinite(filter_logits(logits, [1.0], None, [0.49999]))[0]
    assert got.tolist() == [True] * (num_tokens // 2) + [False] * (num_tokens // 2)
    assert torch.isfinite(filter_logits(logits, [1.0], None, [1e-9]))[0].nonzero().tolist() == [[0]]


def test_ties_beyond_the_candidates() -> None:
    logits = torch.zeros(2, 500)
    logits[:, 300] = 8.0  # 0.857 of the mass; the others 0.000286 each
    got = torch.isfinite(filter_logits(logits, [1.0, 1.0], [2, 0], [0.9, 0.9]))
    assert got[0].tolist() == got[1].tolist()
    assert got[0].sum().item() == 1 + np.ceil((0.9 - np.exp(8) / (np.exp(8) + 499)) * (np.exp(8) + 499))
    assert bool(got[0, 300])
    assert bool(got[0, 0])


def test_frequencies_after_filtering() -> None:
    """The kept tokens keep their proportions."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    p = filter_logits(logits, [2.0], [3]).softmax(-1)[0]
    want = torch.tensor([1.0, 0.5, 0.25, -INF, -INF]).softmax(-1)
    assert torch.allclose(p, want, atol=1e-6)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k"):
        filter_logits(torch.zeros(2, 5), [1.0, 1.0], [1])
    with pytest.raises(ValueError, match="float32"):
        filter_logits(torch.zeros(2, 5, dtype=torch.bfloat16), [1.0, 1.0])


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_top_logprobs(k: int) -> None:
    logits = torch.randn(6, 30) * 2
    chosen = torch.tensor([0, 29, 3, 7, 7, 11])
    ids, logprobs, own, rank = top_logprobs(logits, chosen, k)
    want = torch.log_softmax(logits.double(), -1)
    assert ids.shape == logprobs.shape == (6, min(k, 30))
    for row in range(6):
        order = sorted(range(30), key=lambda t: -logits[row, t].item())
        assert ids[row].tolist() == order[:k]
        assert rank[row].item() == 1 + order.index(chosen[row].item())
    assert torch.allclose(logprobs.double(), want.gather(1, ids), atol=1e-5)
    assert torch.allclose(own.double(), want.gather(1, chosen[:, None])[:, 0], atol=1e-5)


def test_top_logprobs_ties_and_zero_mass() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, -INF, 2.0]])
    ids, logprobs, own, rank = top_logprobs(logits, torch.tensor([2]), 5)
    assert ids[0].tolist() == [1, 4, 0, 2, 3]
    assert logprobs[0, 4].item() == -INF
    assert rank.tolist() == [3]
    assert own[0] == logprobs[0, 2]


@pytest.mark.parametrize("bad", [-INF, float("nan"), INF])
@pytest.mark.parametrize("num_tokens", [11, 997])
def test_rows_without_candidates_do_not_affect_others(bad: float, num_tokens: int) -> None:
    logits = torch.randn(3, num_tokens)
    logits[1] = bad
    for top_k, top_p, min_p in ((0, 0.9, 0.0), (5, 1.0, 0.0), (0, 1.0, 0.1), (5, 1e-9, 0.1)):
        got = filter_logits(logits, [0.7] * 3, [top_k] * 3, [top_p] * 3, [min_p] * 3)
        alone = filter_logits(logits[::2], [0.7] * 2, [top_k] * 2, [top_p] * 2, [min_p] * 2)
        assert torch.equal(got[::2], alone)
        assert not torch.isfinite(got[1].amax())


def test_greedy_means_the_same_here_and_in_the_parameters() -> None:
    assert kernel_package.GREEDY_TEMPERATURE == sampling_params.GREEDY_TEMPERATURE


@pytest.mark.parametrize("count", [0, 1, 128])
def test_logprobs_at_given_tokens(count: int) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(count))
    logits[0, 7] = -INF
    ids = torch.randint(0, 200, (3, count), generator=torch.Generator().manual_seed(1))
    values, ranks = logprobs_at(logits, ids)
    assert values.shape == ranks.shape == (3, count)
    for row in range(3):
        _, _, own, rank = top_logprobs(logits[row].expand(count, -1).contiguous(), ids[row], 0)
        assert values[row].tolist() == own.tolist()
        assert ranks[row].tolist() == rank.tolist()
    with pytest.raises(ValueError, match="do not fit"):
        logprobs_at(logits, ids[:2])
