"""Block verification in float64: every sequence of drafts of a small vocabulary, with its probability; and the kernel
next to it."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels.noise import ROUND, Stream, row_keys, uniform
from outrider.kernels.noise.torch import gumbel
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow
from outrider.spec_decode.verify.draft_sampling import Drafting, draw
from outrider.spec_decode.verify.verification import Rule, VerifyRow, verify

Tables = dict[tuple[int, ...], np.ndarray]
"""Distribution [V] of the next token after each sequence of at most K drafts."""
Chances = Callable[[list[np.ndarray], list[np.ndarray], tuple[int, ...]], list[tuple[float, np.ndarray]]]
"""(p by position [1 + k], q by position [k], drafts [k]) to, for a = 0..k accepted drafts, their probability, and the
distribution of the token after them."""


def normalised(x: np.ndarray) -> np.ndarray:
    return x / x.sum() if x.sum() > 0 else x


def block(p: list[np.ndarray], q: list[np.ndarray], drafts: tuple[int, ...]) -> list[tuple[float, np.ndarray]]:
    """Algorithm 2 of Sun et al. 2024, https://arxiv.org/abs/2403.10444."""
    k, weights = len(drafts), [1.0]
    for j, d in enumerate(drafts):
        weights.append(min(weights[j] * p[j][d] / q[j][d], 1.0))
    rests = [np.maximum(weights[j] * p[j] - q[j], 0.0) for j in range(k)]
    tests = []
    for j in range(k):
        bottom = rests[j].sum() + 1.0 - weights[j]
        tests.append(rests[j].sum() / bottom if bottom > 0 else 1.0)
    tests = [1.0, *tests[1:], weights[k]] if k else [1.0]
    found, later_fail = [], 1.0
    for j in reversed(range(k + 1)):  # the last test that passes counts
        rest = p[k] if j == k else rests[j] if rests[j].sum() > 0 else p[j]
        found.append((tests[j] * later_fail, normalised(rest)))
        later_fail *= 1.0 - tests[j]
    return found[::-1]


def token_wise(p: list[np.ndarray], q: list[np.ndarray], drafts: tuple[int, ...]) -> list[tuple[float, np.ndarray]]:
    """Algorithm 1 of Leviathan et al. 2023, for the comparison."""
    found, before = [], 1.0
    for j, d in enumerate(drafts):
        accept = min(1.0, p[j][d] / q[j][d])
        rest = np.maximum(p[j] - q[j], 0.0)
        found.append((before * (1.0 - accept), normalised(rest if rest.sum() > 0 else p[j])))
        before *= accept
    return [*found, (before, p[len(drafts)])]


def some_tables(rng: np.random.Generator, size: int, k: int, sharp: float, zeros: bool) -> Tables:
    """Random distributions after each sequence of up to k of `size` tokens."""
    tables = {}
    for length in range(k + 1):
        for prefix in itertools.product(range(size), repeat=length):
            weights = rng.exponential(size=size) ** sharp
            if zeros:
                weights[rng.integers(size)] = 0.0
            tables[prefix] = normalised(weights)
    return tables


def enumerated(p: Tables, q: Tables, size: int, k: int, rule: Chances) -> tuple[np.ndarray, float]:
    """Probability [V, ...] of each sequence of k + 1 tokens, and the expected number of accepted drafts."""
    output, expected = np.zeros((size,) * (k + 1)), 0.0
    for drafts in itertools.product(range(size), repeat=k):
        prefixes = [drafts[:j] for j in range(k + 1)]
        chance = float(np.prod([q[prefix][d] for prefix, d in zip(prefixes, drafts, strict=False)]))
        if chance == 0.0:
            continue
        cases = rule([p[prefix] for prefix in prefixes], [q[prefix] for prefix in prefixes[:k]], drafts)
        for accepted, (share, rest) in enumerate(cases):
            expected += chance * share * accepted
            for token, then in enumerate(rest):
                add_rest(output, p, (*drafts[:accepted], token), chance * share * then, k)
    return output, expected


def add_rest(output: np.ndarray, p: Tables, tokens: tuple[int, ...], chance: float, k: int) -> None:
    """Add a round's result to `output`, continued by the target's own tokens up to k + 1."""
    if chance == 0.0:
        return
    if len(tokens) == k + 1:
        output[tokens] += chance
        return
    for token, then in enumerate(p[tokens]):
        add_rest(output, p, (*tokens, token), chance * then, k)


def of_target(p: Tables, size: int, k: int) -> np.ndarray:
    output = np.zeros((size,) * (k + 1))
    add_rest(output, p, (), 1.0, k)
    return output


def cases() -> list[tuple[int, Tables, Tables, int, int]]:
    """(number, p, q, vocabulary, k), sharp and flat, with zeros, and a certain drafter last."""
    rng, made = np.random.default_rng(3), []
    for number in range(60):
        size, k = [(2, 4), (3, 3), (4, 2), (5, 1)][number % 4]
        sharp, zeros = (1.0, 3.0)[number % 2], number % 3 == 0
        p = some_tables(rng, size, k, sharp, zeros)
        other = some_tables(rng, size, k, sharp, zeros)
        near = rng.choice([0.0, 0.5, 1.0])
        q = {prefix: near * p[prefix] + (1.0 - near) * other[prefix] for prefix in p}
        if number % 5 == 4:
            q = {prefix: np.eye(size)[rng.integers(size)] for prefix in p}
        made.append((number, p, q, size, k))
    return made


def test_all_sequences_have_the_targets_probabilities_and_no_fewer_drafts_are_accepted() -> None:
    gains = []
    for number, p, q, size, k in cases():
        output, accepted = enumerated(p, q, size, k, block)
        assert np.abs(output - of_target(p, size, k)).max() < 1e-14, number
        _, before = enumerated(p, q, size, k, token_wise)
        assert accepted >= before - 1e-14, number
        if k == 1 or number % 5 == 4:  # certain drafts: the same numbers of accepted drafts
            assert accepted == pytest.approx(before, abs=1e-14)
        else:
            gains.append(accepted / before)
    assert max(gains) > 1.05


def with_noise(p: Tensor, row: VerifyRow) -> tuple[list[int], int]:
    """`block` with the noise of the kernel, p [1 + k, V] in float64."""
    k = len(row.draft_ids)
    q = torch.eye(p.shape[1], dtype=torch.float64)[list(row.draft_ids)]
    q = q if row.draft_probs is None else row.draft_probs.double()
    found = block(list(p.numpy()), list(q.numpy()), tuple(row.draft_ids))
    start, later_fail, accepted = row.first_position * ROUND, 1.0, 0
    for j in reversed(range(1, k + 1)):
        test = found[j][0] / later_fail if later_fail > 0 else 0.0
        if uniform(row_keys([row.seed_key], [start + j], Stream.ACCEPT)).item() < test:
            accepted = j
            break
        later_fail *= 1.0 - test
    noise = gumbel(row_keys([row.seed_key], [start + accepted], Stream.RESIDUAL), p.shape[1])[0].double()
    rest = torch.from_numpy(found[accepted][1])
    return [*row.draft_ids[:accepted], int((rest.log() + noise).argmax())], accepted


def some_rows(count: int) -> tuple[list[Tensor], list[VerifyRow]]:
    generator = torch.Generator().manual_seed(5)
    rows, tables = [], []
    for number in range(count):
        k = number % 6
        table = torch.randn(1 + k, 40, generator=generator) * 2
        q = (table[:k] + 0.7 * torch.randn(k, 40, generator=generator)).softmax(-1)
        drafts = q.multinomial(1, generator=generator)[:, 0].tolist() if k else []
        rows.append(VerifyRow(number * 77 - 9, number, drafts, q if number % 4 and k else None, Rule.REJECTION))
        tables.append(table)
    return tables, rows


def test_the_kernel_is_the_papers_algorithm() -> None:
    tables, rows = some_rows(600)
    results = verify(torch.cat(tables), rows)
    assert results == [with_noise(t.double().softmax(-1), row) for t, row in zip(tables, rows, strict=True)]
    assert {num_accepted for _, num_accepted in results} == set(range(6))


def test_a_row_without_an_allowed_token_ends_the_drafts() -> None:
    """The drafts before it are judged as if the block ended there."""
    tables, rows = some_rows(300)
    kept = [i for i, row in enumerate(rows) if len(row.draft_ids) == 4 and row.draft_probs is not None]
    cut, whole = [], []
    for i in kept:
        table = tables[i].clone()
        table[2] = -torch.inf
        row = rows[i]
        assert row.draft_probs is not None
        cut.append(verify(table, [row])[0].num_accepted)
        short = row._replace(draft_ids=row.draft_ids[:2], draft_probs=row.draft_probs[:2])
        whole.append(verify(tables[i][:3], [short])[0].num_accepted)
    assert cut == whole
    assert set(cut) == {0, 1, 2}


def test_each_verification_step_uses_fresh_noise() -> None:
    """Drafts of token 0, then of either. The second draft decides whether the first one is accepted; what follows token
    1 in the next round is either again."""
    always, either = torch.tensor([0.0, -torch.inf]), torch.zeros(2)
    after, total = [], 300
    for seed in range(total):
        request = Request("r", [0], 1, SamplingParams(), seed_key=seed)
        drafting = Drafting(DraftRow(request, request.tokens, 0, 0, 2, (), True), Rule.REJECTION)
        draw([drafting], always[None].clone())
        draw([drafting], either[None].clone())
        drafts = drafting.drafts
        row = VerifyRow(seed, 1, drafts.token_ids, drafts.probs, Rule.REJECTION)
        found = verify(torch.stack([either, always, either]), [row])[0].token_ids
        assert found[:2] == [0, 0] or found == [1]
        if found == [1]:
            drafting = Drafting(DraftRow(request, [0, 1], 0, 0, 1, (), True), Rule.REJECTION)
            draw([drafting], either[None].clone())
            after += drafting.draft_ids
    assert len(after) == pytest.approx(total / 2, abs=50)
    assert sum(after) == pytest.approx(len(after) / 2, abs=40)
