"""Adapters' draft weights in EAGLE and Medusa heads: each row is drafted for with its own, as with merged weights."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from outrider.models.batch import allocate_kv
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput

BLOCK = 4


class Site:
    """A full-rank "adapter": for the tokens of the handle "a", the projection's weight is W + delta."""

    def __init__(self, deltas: list[torch.Tensor]) -> None:
        self.delta = torch.cat(deltas)

    def start(self, x, adapters) -> None:
        return None

    def add(self, y, x, adapters, started=None) -> None:
        mask = torch.tensor([float(handle == "a") for handle in adapters])
        assert len(mask) == len(x)
        y += mask[:, None] * (x @ self.delta.T)


_PREPARED = []


def prepare(handles):
    """One entry a token; None when no row has draft weights. As on a GPU it is good until the next call."""
    _PREPARED[:] = [handle for handle, count in handles for _ in range(count)]
    return _PREPARED if "a" in _PREPARED else None


def adapt(drafter, weights: dict) -> dict:
    """Give each projection a site; the weights that a merged head would have."""
    generator, merged = torch.Generator().manual_seed(9), dict(weights)
    for linear in drafter.needs.linears:
        deltas = []
        for full, _ in linear.slices:
            name = full.removeprefix("model.")
            weight = weights[f"{name}.weight"]
            deltas.append(0.3 * torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
            merged[f"{name}.weight"] = weight + deltas[-1]
        linear.lora = Site(deltas)
    return merged


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {"fc_bias": True}),
        ("eagle3", {"draft_vocab": 60}),
        ("eagle3", {"layers": 3}),
        ("eagle3", {"layers": 2, "mask_token": 7, "draft_vocab": 60}),
    ],
    ids=["eagle", "eagle3", "three layers", "P-EAGLE"],
)
def test_each_row_is_drafted_for_with_its_own_weights(target, make_head, load_head, method, options):
    base, tuned = make_head(method, **options), make_head(method, **options)
    drafter = load_head(base)
    tuned.weights = adapt(drafter, base.weights)
    drafter.bind(allocate_kv(drafter.needs.kv_layers, 64, BLOCK, torch.float32), prepare)
    generator = torch.Generator().manual_seed(2)

    def draw(count):
        return torch.randint(0, target.vocab_size, (count,), generator=generator).tolist()

    requests, tables = [], []
    for i, adapter in enumerate([None, "a", "a", None]):
        tokens = draw(4 + 3 * i)
        params = SamplingParams(temperature=0.0)
        requests.append(Request(f"r{i}", tokens, len(tokens), params, seed_key=i, adapter=adapter))
        tables.append(list(range(16 * i, 16 * i + 16)))
    computed, valid = [0] * 4, [0] * 4
    different = 0
    for k in (3, 0, 0, 2, 3):  # a spell without drafts: the hidden states of adapted rows are fused at once
        rows, states, total = [], [], 0
        for i, request in enumerate(requests):
            start, request.tokens = computed[i], request.tokens + draw(2 if computed[i] else 1)
            end = len(request.tokens) - 1
            row = DraftRow(request, request.tokens, end, valid[i], k, tables[i], True, start, total)
            states.append([state[start:] for state in target.states(request.tokens[:-1])])
            rows.append(row)
            total, computed[i] = total + end - start, end
        joined = [torch.cat(parts) for parts in zip(*states, strict=True)]
        aux = tuple(joined[i] for i in drafter.needs.aux_layers)
        for i, proposal in enumerate(drafter.propose(rows, TargetOutput(joined[-1], aux))):
            valid[i] = proposal.num_draft_computed
            mine, other = (tuned, base) if requests[i].adapter else (base, tuned)
            tokens, ids = requests[i].tokens, proposal.drafts.token_ids
            assert len(ids) == k
            mine.check_greedy(tokens, ids)
            different += any(int(x.argmax()) != d for x, d in zip(other.logits(tokens, ids), ids, strict=True))
    assert different > 0, "the adapter makes a difference"


def test_medusa_rows_have_their_own_weights(load_head, tmp_path):
    weights = {}
    for i in range(3):
        weights[f"{i}.0.linear.weight"] = torch.randn(32, 32) * 0.3
        weights[f"{i}.1.weight"] = torch.randn(97, 32)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    drafter = load_head(tmp_path, "medusa", num_speculative_tokens=3)
    merged = adapt(drafter, weights)
    drafter.bind([], prepare)
    hidden = torch.randn(3, 32)
    rows = []
    for i, (adapter, k) in enumerate([("a", 1), (None, 3), ("a", 2)]):
        request = Request(f"r{i}", [1], 1, SamplingParams(temperature=0.0), seed_key=i, adapter=adapter)
        rows.append(DraftRow(request, [1, 2], 1, 0, k, [], True, 0, i))
    for i, proposal in enumerate(drafter.propose(rows, TargetOutput(hidden))):
        w = SimpleNamespace(of=merged if rows[i].request.adapter else weights)
        expected = []
        for head in range(rows[i].max_drafts):
            x = hidden[i] + F.silu(w.of[f"{head}.0.linear.weight"] @ hidden[i])
            expected.append(int((w.of[f"{head}.1.weight"] @ x).argmax()))
        assert proposal.drafts.token_ids == expected
