"""Verification in Triton against plain torch and against the CPU's rules; in the interpreter if there is no GPU."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from outrider.kernels import noise as noise_package
from outrider.kernels import sampling as sampling_package
from outrider.kernels import verification as package
from outrider.kernels.staging import Download, upload
from outrider.kernels.verification import GREEDY, INVARIANT, REJECTION, Requests, pack
from outrider.kernels.verification import torch as reference
from outrider.kernels.verification import triton as kernels
from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.engine.sampling import sampler as sampler_module
from outrider.platform.engine.sampling.sampler import Sampler, SampleRow
from outrider.spec_decode.verify.verification import Rule, VerifyRow, as_verified, choose, target_tokens, verify

INF, NAN = float("inf"), float("nan")
RULES = [GREEDY, INVARIANT, REJECTION]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a GPU would do in Triton is done in Triton, in the interpreter if need be."""
    for module in (noise_package, sampling_package, package, sampler_module):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of Pearson's test."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), torch.tensor(statistic / 2)))


def run(logits: torch.Tensor, q: torch.Tensor | None, requests: Requests, device: str) -> tuple[torch.Tensor, ...]:
    there = Requests(*(part.to(device) for part in requests[:-2]), *requests[-2:])
    q = None if q is None else q.to(device)
    return tuple(part.cpu() for part in kernels.verify(logits.to(device), q, there, None))


def some_requests(num_tokens: int, first_rule: int) -> tuple[torch.Tensor, torch.Tensor, Requests]:
    """Ragged, of all rules; drafts that are often right, some of them certain."""
    ks = [0, 1, 2, 3, 8, 5, 0, 4]
    rules = [RULES[(i + first_rule) % 3] for i in range(len(ks))]
    certain = [i % 4 == 1 for i in range(len(ks))]
    logits = torch.randn(sum(ks) + len(ks), num_tokens) * 2
    drafts, probs, row = [], [], 0
    for k, rule, sure in zip(ks, rules, certain, strict=True):
        q = (logits[row : row + k] + 0.3 * torch.randn(k, num_tokens)).softmax(-1)
        drawn = torch.multinomial(q, 1)[:, 0] if k and rule == REJECTION else logits[row : row + k].argmax(-1)
        drafts.append(drawn.tolist())
        if not sure:
            probs.append(q)
        row += k + 1
    seeds = [5 + i - 2**63 * (i % 2) for i in range(len(ks))]
    requests = pack(drafts, certain, rules, seeds, [10 * i for i in range(len(ks))], torch.device("cpu"))
    return logits, torch.cat(probs), requests


@pytest.mark.parametrize("num_tokens", [33, 1000, 4097])
@pytest.mark.parametrize("first_rule", [0, 1, 2])
def test_ragged_requests_are_verified_as_by_the_reference(device: str, num_tokens: int, first_rule: int) -> None:
    logits, q, requests = some_requests(num_tokens, first_rule)
    tokens, accepted = run(logits, q, requests, device)
    want_tokens, want_accepted = reference.verify(logits, q, requests)
    assert torch.equal(accepted, want_accepted)
    assert torch.equal(tokens, want_tokens)
    assert 0 < accepted.sum() < requests.num_drafts.sum()
    assert kernels._counters(torch.device(device), 1024).sum() == 0, "a launch leaves zeros for the next"


def test_results_of_chunks_are_gathered_in_pieces(device: str) -> None:
    """With room for many drafts a launch reads a few chunks of each row at a time."""
    logits, q, requests = some_requests(4097, 0)
    logits[0, 4096], logits[3, 700], logits[8, 4000], logits[12] = 50.0, NAN, INF, -INF
    tokens, accepted = run(logits, q, requests, device)
    assert tokens[0] == 4096  # in the last chunk
    again = run(logits, q, requests._replace(max_drafts=255), device)
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], accepted)


def test_padding_rows_are_not_written(device: str) -> None:
    """As in a captured graph: more rows and requests than there are, and more drafts than any request has."""
    logits, q, requests = some_requests(33, 0)
    padded = Requests(
        *(torch.cat([part, torch.full((5,), -1)]) for part in requests[:3]),
        *(torch.cat([part, torch.full((2,), 0)]) for part in requests[3:-2]),
        max_drafts=15,
        sampled=True,
    )
    tokens, accepted = run(torch.cat([logits, torch.full((5, 33), NAN)]), q, padded, device)
    want_tokens, want_accepted = reference.verify(logits, q, requests)
    assert torch.equal(tokens, torch.cat([want_tokens, torch.full((5,), -1)]))
    assert torch.equal(accepted[:-2], want_accepted)


@pytest.mark.parametrize("rule", RULES)
def test_rows_without_an_allowed_token_do_not_affect_others(device: str, rule: int) -> None:
    logits = torch.randn(9, 1500)
    clean = logits.clone()
    logits[0], logits[3, 700], logits[4, 3] = -INF, NAN, INF
    requests = pack([[3], [5, 6], [8, 9, 10]], [True] * 3, [rule] * 3, [1, 2, 3], [0, 0, 0], torch.device("cpu"))
    tokens, accepted = run(logits, None, requests, device)
    assert ((tokens >= -1) & (tokens < 1500)).all()
    alone = reference.verify(clean, None, requests)
    assert torch.equal(tokens[5:], alone[0][5:])
    assert accepted[2] == alone[1][2]


def test_empty_residual_samples_from_p(device: str) -> None:
    """Up to rounding that is p = q; here q is made too large everywhere."""
    count = 12
    logits = torch.randn(2 * count, 40)
    q = logits[::2].softmax(-1) * 5
    drafts = [[int(row.argmax())] for row in q]
    requests = pack(drafts, [False] * count, [REJECTION] * count, range(count), [3] * count, torch.device("cpu"))
    got, want = run(logits, q, requests, device), reference.verify(logits, q, requests)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert (got[1] == 0).sum() > count / 2


def test_a_drafter_that_failed_is_rejected(device: str) -> None:
    logits = torch.randn(4, 50)
    q = torch.full((3, 50), NAN)
    requests = pack([[4, 5, 6]], [False], [REJECTION], [9], [2], torch.device("cpu"))
    tokens, accepted = run(logits, q, requests, device)
    assert accepted.tolist() == [0]
    assert torch.equal(tokens, reference.verify(logits, q, requests)[0])


def test_rejection_sampling_draws_from_p(device: str) -> None:
    """First and second tokens have the target's distribution, whether accepted, recovered or a bonus."""
    count = 20_000 if device == "cuda" else 160
    p = torch.tensor([0.4, 0.3, 0.0, 0.2, 0.1])
    q = torch.tensor([0.1, 0.3, 0.3, 0.1, 0.2])
    drafts = torch.multinomial(q, count, replacement=True)
    requests = pack(
        [[d] for d in drafts.tolist()],
        [False] * count,
        [REJECTION] * count,
        range(count),
        [7] * count,
        torch.device("cpu"),
    )
    tokens, accepted = run(p.log().expand(2 * count, -1).contiguous(), q.expand(count, -1), requests, device)
    tokens = tokens.view(count, 2)
    right = accepted == 1
    kept = p > 0
    first = torch.bincount(tokens[:, 0], minlength=5)
    bonus = torch.bincount(tokens[right, 1], minlength=5)
    recovered = torch.bincount(tokens[~right, 0], minlength=5)
    assert first[2] == bonus[2] == 0
    assert chi_square_p(first[kept].numpy(), (p[kept] * count).numpy()) > 1e-4
    assert chi_square_p(bonus[kept].numpy(), (p[kept] * right.sum()).numpy()) > 1e-4
    rest = (p - q).clamp(min=0.0)
    assert (recovered[rest == 0] == 0).all()
    assert chi_square_p(recovered[rest > 0].numpy(), (rest / rest.sum() * (~right).sum())[rest > 0].numpy()) > 1e-4
    rate = torch.minimum(p, q).sum().item()
    assert abs(right.float().mean().item() - rate) < 4 * (rate * (1 - rate) / count) ** 0.5
    assert (tokens[~right, 1] == -1).all()


def test_invariant_verification_equals_the_cpu(device: str, request: pytest.FixtureRequest) -> None:
    """20 tokens of a tiny language, with good, bad and no drafts, greedy and seeded."""
    table = torch.randn(12, 12) * 2
    texts = {rule: [3] for rule in (Rule.GREEDY, Rule.INVARIANT)}
    for rule, text in texts.items():
        while len(text) < 21:
            text += verify(table[text[-1]][None], [VerifyRow(99, len(text), [], None, rule)])[0].token_ids
    request.getfixturevalue("on_device")
    for rule, text in texts.items():
        for k in (0, 3, 8):
            found = [3]
            while len(found) < 21:
                drafts = text[len(found) : len(found) + k]
                drafts = [*drafts[:-1], 0] if len(found) % 2 else drafts
                logits = table[[found[-1], *drafts]].to(device)
                rows = [VerifyRow(99, len(found), drafts, None, rule)]
                choices = choose(logits, rows)
                found += as_verified(rows, choices.token_ids.tolist(), choices.num_accepted.tolist())[0].token_ids
            assert found[:21] == text


def test_target_tokens_equal_the_cpus(device: str) -> None:
    """Tokens that drafters choose by: greedy rows between sampled ones."""
    logits, seeds, positions = torch.randn(6, 1000) * 3, [1, -2, 3, 4, 2**64 - 1, 6], [0, 5, 9, 2**20, 1, 7]
    for greedy in ([True] * 6, [False] * 6, [i % 2 == 0 for i in range(6)]):
        want = target_tokens(logits, seeds, positions, greedy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package, "use_triton", lambda x: True)
            got = target_tokens(logits.to(device), seeds, positions, greedy)
        assert torch.equal(got.cpu(), want)


def test_uploads_are_aligned_and_downloads_exact(device: str) -> None:
    arrays = [np.arange(3), np.array([0.1, -INF, NAN]), np.arange(0), np.array([-(2**63), 2**63 - 1])]
    there = upload(torch.device(device), *arrays)
    assert [part.data_ptr() % 16 for part in there] == [there[0].data_ptr() % 16] * 4
    for part, array in zip(there, arrays, strict=True):
        assert np.array_equal(part.cpu().numpy(), array, equal_nan=array.dtype.kind == "f")
    floats = torch.tensor([[0.1, -INF], [3e-39, 1.0]], device=device)
    assert Download([there[3], floats, there[2]]).wait() == [[-(2**63), 2**63 - 1], floats.tolist(), []]


def sample_rows() -> list[SampleRow]:
    params = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.8, seed=3, top_k=10, logprobs=0),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={5: 2.0}),
        SamplingParams(temperature=1.0, seed=4, allowed_token_ids=[1, 2, 8], logprobs=5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
    ]
    drafts = [[4, 7], [], [3], [9, 9, 9], [1], [6], [2, 3]]
    probs = torch.full((1, 60), 1 / 60)
    return [
        SampleRow(
            Request(str(i), tokens=[1, 2, 3, 9], num_prompt_tokens=3, params=param, seed_key=1000 + i),
            Drafts(ids, probs if i == 2 else None),
        )
        for i, (param, ids) in enumerate(zip(params, drafts, strict=True))
    ]


def test_the_sampler_waits_once_and_returns_the_cpus_results(device: str, request: pytest.FixtureRequest) -> None:
    rows = sample_rows()
    logits = torch.randn(sum(1 + len(row.drafts.token_ids) for row in rows), 60)
    logits[-5] = NAN  # the request without parameters has no usable logits
    logits[-1] = -INF
    logits[0, 4] = logits[1, 7] = 9.0  # two drafts are right
    want = Sampler()(logits.clone(), rows)
    request.getfixturevalue("on_device")
    there = [
        row._replace(
            drafts=Drafts(row.drafts.token_ids, None if row.drafts.probs is None else row.drafts.probs.to(device))
        )
        for row in rows
    ]
    got = Sampler().launch(logits.to(device), there).collect()
    assert [entry.token_ids for entry in got] == [entry.token_ids for entry in want]
    assert [entry.num_accepted for entry in got] == [entry.num_accepted for entry in want]
    assert [entry.error for entry in got] == [entry.error for entry in want]
    assert got[0].num_accepted == 2
    assert got[5].error is not None
    for one, other in zip(got, want, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert (a.token_ids, a.rank) == (b.token_ids, b.rank)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_wrong_shapes_are_refused() -> None:
    requests = pack([[1]], [False], [REJECTION], [1], [0], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"float32 \[2, V\]"):
        package.verify(torch.zeros(3, 5), None, requests)
    with pytest.raises(ValueError, match=r"draft_probs must be float32 \[N, 5\]"):
        package.verify(torch.zeros(2, 5), torch.zeros(1, 4), requests)


@pytest.mark.gpu
def test_a_captured_graph_replays_for_other_requests(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    logits, q, requests = some_requests(1000, 0)
    still = Requests(*(part.to(device) for part in requests[:-2]), max_drafts=8, sampled=True)
    still_logits, still_q = logits.to(device), q.to(device)
    kernels.verify(still_logits, still_q, still, None)  # compile
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, accepted = kernels.verify(still_logits, still_q, still, None)
    for first_rule in (1, 2, 0):
        logits, q, requests = some_requests(1000, first_rule)
        for part, new in zip((still_logits, still_q, *still[:-2]), (logits, q, *requests[:-2]), strict=True):
            part.copy_(new)
        graph.replay()
        want_tokens, want_accepted = reference.verify(logits, q, requests)
        assert torch.equal(tokens.cpu(), want_tokens)
        assert torch.equal(accepted.cpu(), want_accepted)
