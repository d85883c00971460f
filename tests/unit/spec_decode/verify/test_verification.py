"""Both verification rules: the chosen tokens, and their frequencies."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels.noise import ROUND, Stream, gumbel_argmax, row_keys
from outrider.kernels.noise.torch import gumbel
from outrider.kernels.sampling import filter_logits
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.verify.verification import Rule, VerifyRow, accept_equal, choose_rule, target_tokens, verify

INF = float("inf")
SEEDS = range(10**6, 10**9, 7919)


def chi_square_p(counts: Sequence[float], expected: Sequence[float]) -> float:
    """p-value of Pearson's test; categories with a zero expectation must be empty."""
    pairs = [(c, e) for c, e in zip(counts, expected, strict=True) if e > 0]
    assert sum(c for c, _ in pairs) == sum(counts), "a token of zero mass was chosen"
    statistic = sum((c - e) ** 2 / e for c, e in pairs)
    return float(torch.special.gammaincc(torch.tensor((len(pairs) - 1) / 2), torch.tensor(statistic / 2)))


def log_of_probabilities(p: Sequence[float]) -> Tensor:
    return torch.tensor([math.log(x) if x > 0 else -INF for x in p])


# --- choosing the rule, accepting equal drafts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "invariant", "rule"),
    [
        (SamplingParams(temperature=0.0), False, Rule.GREEDY),
        (SamplingParams(temperature=0.0, seed=3), True, Rule.GREEDY),
        (SamplingParams(seed=3), False, Rule.INVARIANT),
        (SamplingParams(), False, Rule.REJECTION),
        (SamplingParams(), True, Rule.INVARIANT),
    ],
)
def test_rule(params: SamplingParams, invariant: bool, rule: Rule) -> None:
    assert choose_rule(Request("r", [1], 1, params, seed_key=1), invariant) is rule


@pytest.mark.parametrize(
    ("drafts", "targets", "tokens", "accepted"),
    [([], [4], [4], 0), ([4, 5], [4, 5, 6], [4, 5, 6], 2), ([4, 5], [4, 7, 6], [4, 7], 1), ([3, 5], [4, 5, 6], [4], 0)],
)
def test_accept_equal(drafts: list[int], targets: list[int], tokens: list[int], accepted: int) -> None:
    assert accept_equal(drafts, targets) == (tokens, accepted)


# --- target tokens -----------------------------------------------------------------------------------------------


def test_target_tokens_are_the_definition() -> None:
    logits = torch.randn(6, 500)
    seeds, positions = [5, 5, 9, 9, -3, 0], [1, 2, 1, 2, 70, 0]
    greedy = [False, True, False, False, True, False]
    got = target_tokens(logits, seeds, positions, greedy)
    noise = gumbel(row_keys(seeds, positions, Stream.TARGET), 500)
    coupled = (logits.log_softmax(-1) + noise).argmax(-1)
    assert torch.equal(got, torch.where(torch.tensor(greedy), logits.argmax(-1), coupled))


def test_target_tokens_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(20, 3000)
    seeds, positions, greedy = list(range(20)), list(range(20)), [i % 3 == 0 for i in range(20)]
    together = target_tokens(logits, seeds, positions, greedy)
    alone = [target_tokens(logits[i : i + 1], seeds[i : i + 1], [i], greedy[i : i + 1]).item() for i in range(20)]
    assert together.tolist() == alone


def test_target_tokens_at_a_very_low_temperature() -> None:
    """The noise keeps its resolution with logits in the thousands."""
    logits = filter_logits(log_of_probabilities([0.5, 0.3, 0.2])[None].repeat(4000, 1) * 1e-4 + 1.0, [1e-4] * 4000)
    counts = torch.bincount(target_tokens(logits, [1] * 4000, range(4000), [False] * 4000), minlength=3)
    assert counts.min() > 600


# --- a small world: the next token depends on the last one --------------------------------------------------------

VOCAB = 8


def random_rows(seed: int, zeros: bool = False) -> Tensor:
    """[VOCAB, VOCAB] logits of the next token after each."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    if zeros:
        table[:, seed % VOCAB] = -INF
        table[torch.arange(VOCAB), (torch.arange(VOCAB) * 3 + seed) % VOCAB] = -INF
    return table


TARGET = random_rows(1, zeros=True)
GOOD = (TARGET + 0.3 * random_rows(2)).nan_to_num(neginf=-6.0)  # puts a little mass on tokens without any in the target
BAD = random_rows(3)
OTHER_ZEROS = random_rows(4, zeros=True)

Drafter = Callable[[int, int, int], tuple[int, Tensor | None]]
"""(seed key, position, last token) to a draft and its q [VOCAB]."""


def coupled(table: Tensor) -> Drafter:
    def draft(seed: int, position: int, last: int) -> tuple[int, Tensor | None]:
        return target_tokens(table[last : last + 1], [seed], [position], [False]).item(), None

    return draft


def constant(seed: int, position: int, last: int) -> tuple[int, Tensor | None]:
    return (last + position) % VOCAB, None


def generate(drafter: Drafter | None, ks: Sequence[int], rule: Rule, seed: int, length: int) -> list[int]:
    """Grow one sequence with `ks[i]` drafts in round i (cyclically), as the engine does."""
    tokens = [seed % VOCAB]
    for k in itertools.cycle(ks):
        if len(tokens) >= length:
            return tokens[:length]
        drafts: list[int] = []
        for j in range(k if drafter else 0):
            drafts.append(drafter(seed, len(tokens) + j, [*tokens, *drafts][-1])[0])
        rows = TARGET[torch.tensor([tokens[-1], *drafts])]
        tokens += verify(rows, [VerifyRow(seed, len(tokens), drafts, None, rule)])[0].token_ids
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.INVARIANT, Rule.GREEDY])
def test_the_same_seed_gives_the_same_tokens_for_any_drafter_and_k(rule: Rule) -> None:
    drafters = [coupled(TARGET), coupled(GOOD), coupled(BAD), constant]
    for seed in (0, 5, 1234567):
        plain = generate(None, [0], rule, seed, 40)
        for drafter in drafters:
            for ks in ([1], [3], [5], [2, 0, 4, 1]):
                assert generate(drafter, ks, rule, seed, 40) == plain
    if rule is Rule.INVARIANT:
        assert generate(None, [0], rule, 1, 40)[1:] != generate(None, [0], rule, 9, 40)[1:]


def test_a_perfect_coupled_drafter_is_always_right() -> None:
    seed, drafts, last = 77, [], 3
    for j in range(20):
        drafts.append(coupled(TARGET)(seed, 10 + j, last)[0])
        last = drafts[-1]
    rows = TARGET[torch.tensor([3, *drafts])]
    tokens, accepted = verify(rows, [VerifyRow(seed, 10, drafts, None, Rule.INVARIANT)])[0]
    assert accepted == 20
    assert tokens[:20] == drafts


# --- frequencies ---------------------------------------------------------------------------------------------------


def draft_rows(table: Tensor | None, seeds: Sequence[int], lasts: list[int], first: list[int], ks: list[int]):
    """Draft for many requests at once: independent draws from `table` with their q, or certain drafts without."""
    ids: list[list[int]] = [[] for _ in seeds]
    probs: list[list[Tensor]] = [[] for _ in seeds]
    last = list(lasts)
    for j in range(max(ks)):
        active = [i for i, k in enumerate(ks) if k > j]
        if table is None:
            drawn = [(last[i] + 1) % VOCAB for i in active]
        else:
            q = table[torch.tensor([last[i] for i in active])].log_softmax(-1)
            keys = row_keys([seeds[i] for i in active], [first[i] * ROUND + j for i in active], Stream.DRAFT)
            drawn = gumbel_argmax(q, keys).tolist()
        for place, (i, token) in enumerate(zip(active, drawn, strict=True)):
            ids[i].append(token)
            last[i] = token
            if table is not None:
                probs[i].append(q[place].exp())
    return ids, [torch.stack(rows) if rows else None for rows in probs]


def verify_round(
    table: Tensor | None, rule: Rule, seeds: Sequence[int], lasts: list[int], first: list[int], ks: list[int]
) -> list[list[int]]:
    ids, probs = draft_rows(table, seeds, lasts, first, ks)
    logits = TARGET[torch.tensor([token for last, row in zip(lasts, ids, strict=True) for token in (last, *row)])]
    rows = [VerifyRow(s, f, d, q, rule) for s, f, d, q in zip(seeds, first, ids, probs, strict=True)]
    return [list(result.token_ids) for result in verify(logits, rows)]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.INVARIANT])
@pytest.mark.parametrize("drafter", ["good", "bad", "other zeros", "the target", "certain"])
def test_two_tokens_have_the_targets_joint_distribution(drafter: str, rule: Rule) -> None:
    """Ragged k from 0 to 3; sequences that got one token continue with a second round, so that noise of a rejected
    draft's position is reused."""
    table = {"good": GOOD, "bad": BAD, "other zeros": OTHER_ZEROS, "the target": TARGET, "certain": None}[drafter]
    num, start = 8_000, 3
    seeds = SEEDS[:num]
    ks = [i % 4 for i in range(num)]
    tokens = verify_round(table, rule, seeds, [start] * num, [5] * num, ks)
    short = [i for i in range(num) if len(tokens[i]) < 2]
    again = verify_round(
        table, rule, [seeds[i] for i in short], [tokens[i][0] for i in short], [6] * len(short), [1] * len(short)
    )
    for i, more in zip(short, again, strict=True):
        tokens[i] += more
    counts = np.zeros((VOCAB, VOCAB))
    for pair in tokens:
        counts[pair[0], pair[1]] += 1
    p = TARGET.softmax(-1)
    expected = (p[start, :, None] * p).double().numpy() * num
    assert chi_square_p(counts.sum(1).tolist(), expected.sum(1).tolist()) > 1e-4
    assert chi_square_p(counts.ravel().tolist(), expected.ravel().tolist()) > 1e-4


@pytest.mark.parametrize("drafter", ["good", "bad", "certain"])
def test_the_token_after_three_drafts(drafter: str) -> None:
    """Rejections at each depth: the token there has the target's distribution given those before."""
    table = {"good": GOOD, "bad": BAD, "certain": None}[drafter]
    num = 8_000
    results = verify_round(table, Rule.REJECTION, SEEDS[:num], [0] * num, [9] * num, [3] * num)
    p = TARGET.softmax(-1)
    counts = np.zeros((VOCAB, VOCAB))
    for tokens in results:
        if len(tokens) >= 3:
            counts[tokens[1], tokens[2]] += 1
    # Whether there is a third token depends on the second being an accepted draft; given that, the third is free.
    for second in range(VOCAB):
        if counts[second].sum() > 400:
            expected = p[second].double() * counts[second].sum()
            assert chi_square_p(counts[second].tolist(), expected.tolist()) > 1e-4


def test_acceptance_of_both_rules() -> None:
    """Rejection sampling accepts with 1 - TV; the Gumbel coupling with at least (1 - TV) / (1 + TV)."""
    num = 6_000
    for table in (GOOD, BAD):
        for last in (0, 5):
            p, q = TARGET[last].softmax(-1).double(), table[last].softmax(-1).double()
            tv = (p - q).abs().sum().item() / 2
            deviation = 4.5 * math.sqrt(0.25 / num)
            seeds, first = list(SEEDS[:num]), [4] * num
            ids, probs = draft_rows(table, seeds, [last] * num, first, [1] * num)
            rows = [VerifyRow(s, 4, d, x, Rule.REJECTION) for s, d, x in zip(seeds, ids, probs, strict=True)]
            logits = TARGET[torch.tensor([token for d in ids for token in (last, *d)])]
            accepted = torch.tensor([got.num_accepted for got in verify(logits, rows)])
            assert accepted.double().mean().item() == pytest.approx(1 - tv, abs=deviation)

            target = target_tokens(TARGET[last].expand(num, -1), seeds, first, [False] * num)
            draft = target_tokens(table[last].expand(num, -1), seeds, first, [False] * num)
            rate = (target == draft).double().mean().item()
            assert rate >= (1 - tv) / (1 + tv) - deviation
            assert rate <= 1 - tv + deviation


def test_coupled_drafts_have_their_own_distribution() -> None:
    num = 20_000
    draft = target_tokens(GOOD[2].expand(num, -1), SEEDS[:num], [4] * num, [False] * num)
    counts = torch.bincount(draft, minlength=VOCAB).tolist()
    assert chi_square_p(counts, (GOOD[2].softmax(-1).double() * num).tolist()) > 1e-4


# --- corners of rejection sampling ---------------------------------------------------------------------------------


def reject_many(p: Sequence[float], q: Sequence[float] | None, draft: int, num: int = 4000) -> tuple[Tensor, Tensor]:
    """One draft for many seeds: (accepted, next token)."""
    logits = torch.stack([log_of_probabilities(p), torch.zeros(len(p))]).repeat(num, 1)
    probs = None if q is None else torch.tensor([q])
    results = verify(logits, [VerifyRow(s, 1, [draft], probs, Rule.REJECTION) for s in SEEDS[:num]])
    return torch.tensor([got.num_accepted for got in results]), torch.tensor([got.token_ids[-1] for got in results])


def test_equal_distributions_always_accept() -> None:
    p = [0.5, 0.3, 0.2, 0.0]
    q = log_of_probabilities(p).softmax(-1).tolist()
    for draft in range(3):
        accepted, _ = reject_many(p, q, draft)
        assert accepted.all()


def test_a_draft_of_zero_mass_is_never_accepted() -> None:
    accepted, token = reject_many([0.6, 0.4, 0.0], [0.2, 0.3, 0.5], draft=2)
    assert not accepted.any()
    # max(p - q, 0) is (0.4, 0.1, 0)
    assert chi_square_p(torch.bincount(token, minlength=3).tolist(), [3200, 800, 0]) > 1e-4


def test_a_draft_that_its_own_distribution_excludes() -> None:
    accepted, _ = reject_many([0.6, 0.4], [1.0, 0.0], draft=1)
    assert accepted.all(), "min(1, p / 0) is 1"
    accepted, token = reject_many([1.0, 0.0], [1.0, 0.0], draft=1)
    assert not accepted.any(), "p is 0"
    assert (token == 0).all(), "the residual is empty: drawn from p"


def test_certain_drafts() -> None:
    accepted, token = reject_many([0.7, 0.2, 0.1], None, draft=1)
    assert accepted.double().mean().item() == pytest.approx(0.2, abs=0.03)
    rest = token[accepted == 0]
    expected = (torch.tensor([7 / 8, 0, 1 / 8]) * len(rest)).tolist()
    assert chi_square_p(torch.bincount(rest, minlength=3).tolist(), expected) > 1e-4
    accepted, _ = reject_many([0.0, 1.0, 0.0], None, draft=1)
    assert accepted.all()


def test_one_possible_token() -> None:
    accepted, token = reject_many([0.0, 0.0, 1.0], [0.3, 0.3, 0.4], draft=0)
    assert not accepted.any()
    assert (token == 2).all()


def test_probs_of_no_drafts() -> None:
    """A row whose drafts were all cut off may still bring an empty q."""
    row = VerifyRow(3, 1, [], torch.empty(0, 4), Rule.REJECTION)
    other = VerifyRow(4, 1, [2], torch.full((1, 4), 0.25), Rule.REJECTION)
    results = verify(torch.zeros(3, 4), [row, other])
    assert len(results[0].token_ids) == 1
    assert results[1].num_accepted == 1
