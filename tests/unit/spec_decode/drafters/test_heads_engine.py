"""Heads in a whole engine: the same text as without speculation, however it is scheduled, and drafts are accepted."""

import json
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from outrider import SamplingParams
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.spec_decode.drafters.eagle.hidden_store import HiddenStore

pytestmark = pytest.mark.slow

METHODS = ["eagle", "eagle3", "medusa"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SCHEDULES = {
    "plain": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 40},  # less would leave no room for six rows of drafts
    "small blocks": {"block_size": 4, "max_num_seqs": 3},
    "preempted": {"max_model_len": 104, "block_size": 8, "num_gpu_blocks_override": 16},
}


@pytest.fixture(scope="session")
def prompts(target):
    generator = torch.Generator().manual_seed(7)
    made = [torch.randint(3, target.vocab_size, (n,), generator=generator).tolist() for n in (5, 17, 33, 60)]
    return [*made, [5, 6, 7, 8] * 6, made[1] * 2]


@pytest.fixture(scope="session")
def texts(target, prompts):
    """The greedy continuations that the heads below have learned by heart."""
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = target.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
            found.append(ids[0].tolist())
    return found


def _readout(features: torch.Tensor, tokens: list[int], size: int) -> torch.Tensor:
    """The linear map [size, H] from features [T, H] that fits the one-hot tokens best (ridge regression)."""
    wanted = F.one_hot(torch.tensor(tokens), size).float()
    gram = features.T @ features + 1e-2 * torch.eye(features.shape[1])
    return 10 * torch.linalg.solve(gram, features.T @ wanted).T


def _learn_by_heart(head, target, prompts, texts) -> None:
    """A few steps of training on the texts, for the first draft and for the second."""
    weights = list(head.weights.values())
    for tensor in weights:
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=0.01)
    states = [target.states(text[:-2]) for text in texts]
    for _ in range(40):
        optimizer.zero_grad()
        for prompt, text, state in zip(prompts, texts, states, strict=True):
            known = head.fuse([s.clone() for s in state])
            for _ in range(2):
                output, logits = head.forward(text[1:-1], known)
                start = len(prompt) - 2
                F.cross_entropy(logits[start:], torch.tensor(text[2 + start :])).backward(retain_graph=True)
                known = torch.cat((known[:1], output[:-1]))
        optimizer.step()
    for tensor in weights:
        tensor.requires_grad_(False)


@pytest.fixture(scope="session")
def folders(target, prompts, texts, make_head, tmp_path_factory):
    """A head of each method that knows the texts."""
    root = tmp_path_factory.mktemp("heads")
    for method in ("eagle", "eagle3"):
        head = make_head(method, own_head=True)
        _learn_by_heart(head, target, prompts, texts)
        head.save(root / method)
    weights = {}
    states = [target.states(text)[-1] for text in texts]
    for i in range(4):
        weights[f"{i}.0.linear.weight"] = torch.zeros(target.hidden_size, target.hidden_size)
        weights[f"{i}.0.linear.bias"] = torch.zeros(target.hidden_size)
        features = torch.cat([state[: -i - 2] for state in states])
        labels = [token for text in texts for token in text[i + 2 :]]
        weights[f"{i}.1.weight"] = _readout(features, labels, target.vocab_size)
    (root / "medusa").mkdir()
    (root / "medusa" / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 1}))
    torch.save(weights, root / "medusa" / "medusa_lm_head.pt")
    return root


@pytest.fixture
def make_engine(target):
    engines = []

    def make(**options):
        values = {"model": str(target.path), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 1}
        engines.append(EngineCore(EngineArgs(**(values | options))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        assert engine.stats().kv_cache_usage == 0.0
        engine.shutdown()


class Outcome(NamedTuple):
    """Results of a run: token ids of each job, and counts of verified drafts, accepted drafts and verifications."""

    texts: list[list[int]]
    num_drafted: int
    num_accepted: int
    num_verified: int


def run(engine, jobs) -> Outcome:
    """Run (prompt, params) each to its end."""
    texts, counts = {str(i): [] for i in range(len(jobs))}, {}
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(EngineRequest(str(i), list(prompt), params, [1]))
    for _ in range(5000):
        if not engine.has_work():
            break
        for delta in engine.step():
            assert delta.error is None
            texts[delta.request_id] += delta.token_ids
            if delta.speculation is not None:
                counts[delta.request_id] = delta.speculation
    assert not engine.has_work()
    sums = (
        sum(getattr(c, f) for c in counts.values())
        for f in ("num_draft_tokens", "num_accepted_tokens", "num_verifications")
    )
    return Outcome(list(texts.values()), *sums)


@pytest.fixture(scope="session")
def plain(target, prompts):
    """Without speculation."""
    engine = EngineCore(EngineArgs(model=str(target.path), dtype="float32", max_model_len=256, max_num_seqs=8, seed=1))
    found = run(engine, [(p, GREEDY) for p in prompts]).texts
    engine.shutdown()
    return found


def speculative(folders, method, **fields):
    return {"method": method, "model": str(folders / method), "num_speculative_tokens": 4, **fields}


@pytest.mark.parametrize("method", METHODS)
def test_acceptance_does_not_depend_on_the_schedule(make_engine, folders, prompts, plain, method):
    """Greedy drafts are a function of the text, which is that without speculation: cached blocks, chunks and lost
    blocks change none of them."""
    seen = {}
    for name, options in SCHEDULES.items():
        engine = make_engine(speculative_config=speculative(folders, method), **options)
        jobs = [(p, GREEDY) for p in prompts]
        run(engine, [(p, params.clone(speculative=False)) for p, params in jobs])  # cached, without draft KV
        outcome = run(engine, jobs)
        assert outcome.texts == plain, name
        seen[name] = outcome.num_accepted / outcome.num_verified
    assert seen["plain"] > 0.1
    # How many drafts fit at the end differs with the budget, and a preempted row proposes none at once.
    assert seen["no prefix cache"] == seen["small blocks"] == seen["plain"]
    for name in ("chunked", "preempted"):
        assert seen[name] == pytest.approx(seen["plain"], rel=0.06), name


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16(make_engine, target, folders, prompts, method):
    """Each token is the most likely one after those before it, up to bfloat16's rounding of the logits."""
    engine = make_engine(dtype="bfloat16", speculative_config=speculative(folders, method))
    outcome = run(engine, [(p, GREEDY) for p in prompts])
    assert outcome.num_accepted > 0
    for prompt, ids in zip(prompts, outcome.texts, strict=True):
        assert len(ids) == 20
        with torch.inference_mode():
            logits = target.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        lost = logits.max(-1).values - logits[torch.arange(20), torch.tensor(ids)]
        # Tokens by chance would lose two or three deviations.
        assert lost.max() < 0.25 * logits.std()


def test_blocks_that_may_be_found_have_all_their_states(make_engine, folders, prompts, texts, monkeypatch):
    """Sequences end anywhere: at a token that was drafted, and at a block's edge. A step's states come after
    its commit, and before the next lookup of blocks."""
    kept, published, lacking = set(), set(), set()

    def kept_by(of):
        def keep(self, rows, states, overshoot):
            for row in rows:
                kept.update((row.block_table[at // 4], at % 4) for at in range(row.start, row.num_valid))
            return of(self, rows, states, overshoot)

        return keep

    def publish(cache, request, of=PrefixCache.publish):
        of(cache, request)
        places = [(block, at) for block in request.blocks[: request.num_published] for at in range(4)]
        published.update(place for place in places if request.namespace is not None)

    def match(cache, request, of=PrefixCache.match):
        lacking.update(published - kept)
        return of(cache, request)

    monkeypatch.setattr(HiddenStore, "write", kept_by(HiddenStore.write))
    monkeypatch.setattr(HiddenStore, "defer", kept_by(HiddenStore.defer))
    monkeypatch.setattr(PrefixCache, "publish", publish)
    monkeypatch.setattr(PrefixCache, "match", match)
    for prompt, text in zip(prompts[:4], texts, strict=False):
        answer = text[len(prompt) :]
        for at, token in enumerate(answer[:-2]):
            if token not in answer[:at]:
                kept.clear()
                published.clear()
                engine = make_engine(speculative_config=speculative(folders, "eagle"), block_size=4, max_num_seqs=3)
                run(engine, [(prompt, GREEDY.clone(stop_token_ids=[token]))])
                assert published
                lacking.update(published - kept)
    assert not lacking
