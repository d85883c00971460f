"""EAGLE heads in every public format against a plain dense forward pass of the same tensors."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels import rms_norm
from outrider.models.layers import norm
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters.eagle import head as eagle_head
from outrider.spec_decode.drafters.eagle.config import read_eagle_config

from ..schedules import BLOCK, Engine, check_sampled, random_schedule

EAGLE1 = {
    "plain": {},
    "fc bias": {"fc_bias": True},
    "own embeddings": {"own_embedding": True, "fc_bias": True, "bin": True},
    "own head, model. prefix": {"own_head": True, "prefix": "model."},
    "rope theta, one KV head": {"theta": 500000.0, "kv_heads": 1},
}
EAGLE3 = {
    "shares all": {},
    "d2t, midlayer, bin": {"draft_vocab": 40, "bin": True, "architecture": "LlamaForCausalLM"},
    "d2t of the whole vocabulary": {"d2t": True, "own_head": True},
    "layers.0, sharded": {"layers0": True, "sharded": True, "own_embedding": True, "own_head": True},
    "smaller": {"hidden": 24, "own_embedding": True, "draft_vocab": 50, "architecture": "Eagle3LlamaForCausalLM"},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "attention_bias": {"attention_bias": True},
    "other layers": {"aux": (0, 4, 1)},
    "two layers": {"aux": (1, 3)},
    "speculators": {"speculators": True, "draft_vocab": 61, "norm_before_residual": True, "own_embedding": True},
    "speculators 3.1": {
        "speculators": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "aux": (1, 2, 4),
        "own_head": True,
    },
    "three layers": {"layers": 3, "draft_vocab": 40},
    "speculators, two layers of Qwen3": {"layers": 2, "speculators": True, "qk_norm": True, "own_embedding": True},
    "layers.0 and layers.1": {"layers": 2, "layers0": True, "norm_before_residual": True},
    "norms of queries and keys": {"qk_norm": True, "norm_output": True},
}
VARIANTS = [("eagle", o) for o in EAGLE1.values()] + [("eagle3", o) for o in EAGLE3.values()]
NAMES = [f"1: {n}" for n in EAGLE1] + [f"3: {n}" for n in EAGLE3]
PUBLIC_NAMES = [
    ("eagle", "LlamaForCausalLM"),
    ("eagle", "EagleLlamaForCausalLM"),
    ("eagle", "LlamaForCausalLMEagle"),
    ("eagle", "Qwen2ForCausalLM"),
    ("eagle", "Qwen2ForCausalLMEagle"),
    ("eagle3", "LlamaForCausalLM"),
    ("eagle3", "Eagle3LlamaForCausalLM"),
    ("eagle3", "EagleLlamaForCausalLM"),
    ("eagle3", "LlamaForCausalLMEagle3"),
    ("eagle3", "Qwen2ForCausalLMEagle3"),
    ("eagle3", "Qwen3ForCausalLMEagle3"),
    ("eagle3", "Eagle3Speculator"),
    ("eagle3", "Eagle3DraftModel"),
]


@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=NAMES)
def test_drafts_are_those_of_a_plain_forward_pass(target, make_head, load_head, method, options):
    head = make_head(method, **options)
    engine = Engine(target, load_head(head))
    sequence = engine.sequence(9)
    for accepted in (0, 3, 1):
        (drafts,) = engine.step((sequence, 4, None, accepted))
        assert len(drafts.token_ids) == 4
        assert drafts.probs is None
        head.check_greedy(sequence.request.tokens, drafts.token_ids)
        assert sequence.num_draft_computed == len(sequence.request.tokens)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_on_a_gpu_the_norm_adds_the_residual(target, make_head, load_head, method, monkeypatch):
    sums = []

    def add(x, residual, weight):
        sums.append(x.shape)
        return rms_norm.add_rms_norm(x, residual, weight)

    monkeypatch.setattr(eagle_head, "adds_residuals", lambda device: True)
    monkeypatch.setattr(norm, "add_rms_norm", add)
    head = make_head(method)
    engine = Engine(target, load_head(head))
    sequence = engine.sequence(9)
    (drafts,) = engine.step((sequence, 4, None, 0))
    head.check_greedy(sequence.request.tokens, drafts.token_ids)
    assert len(sums) >= 4  # once a pass


@pytest.mark.parametrize(("method", "name"), PUBLIC_NAMES)
def test_every_architecture_name_is_read_as_its_kind(decoder, make_head, method, name):
    """Some names apply to both kinds; the method decides."""
    raw = make_head(method).config() | {"architectures": [name]}
    config = read_eagle_config(raw, method, decoder.config)
    assert config.eagle3 == (method == "eagle3")
    assert len(config.aux_layers) == (3 if method == "eagle3" else 0)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_drafts_depend_on_every_tensor(target, make_head, load_head, method):
    """Guards the test above: with any tensor changed, the dense pass gives other logits."""
    head = make_head(method, own_embedding=True, own_head=True, fc_bias=method == "eagle", attention_bias=True)
    tokens, drafts = list(range(3, 12)), [5, 6, 7]
    before = torch.stack(head.logits(tokens, drafts))
    for name, tensor in head.weights.items():
        if name == "layers.0.self_attn.k_proj.bias":
            continue  # the same for all keys up to the rotation: hardly seen
        kept = tensor.clone()
        tensor.mul_(1.5).add_(0.05 * torch.randn(tensor.shape))
        assert (torch.stack(head.logits(tokens, drafts)) - before).abs().max() > 1e-3, name
        tensor.copy_(kept)


@pytest.mark.parametrize(("method", "options"), [("eagle", {}), ("eagle3", {}), ("eagle3", {"draft_vocab": 40})])
@pytest.mark.parametrize("rule", ["independent", "seeded", "invariant"])
def test_sampled_drafts_and_their_distribution(target, make_head, load_head, method, options, rule):
    head = make_head(method, **options)
    fields = {"rejection_sample_method": "invariant"} if rule == "invariant" else {}
    engine = Engine(target, load_head(head, **fields))
    seed = 5 if rule == "seeded" else None
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=seed)
    sequences = [engine.sequence(8, params), engine.sequence(5), engine.sequence(11, params)]
    engine.step(*((s, 3, None, 0) for s in sequences))
    engine.step(*((s, 4, None, 2) for s in sequences))
    check_sampled(sequences, head, target.vocab_size, rule)


@pytest.fixture
def loaded(make_head, load_head):
    made = {}

    def loaded(method, budget):
        if (method, budget) not in made:
            head = make_head(method, **({"draft_vocab": 60} if method == "eagle3" else {"fc_bias": True}))
            made[method, budget] = (head, load_head(head, budget=budget))
        return made[method, budget]

    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_any_schedule_leaves_the_drafts_as_they_are(target, loaded, method):
    @settings(max_examples=12)
    @given(st.integers(0, 2**32), st.sampled_from([5, 2048]))
    def check(seed, budget):
        head, drafter = loaded(method, budget)
        rng = random.Random(seed)
        random_schedule(Engine(target, drafter, rng), head, rng, steps=12, whole=budget > 100)

    check()


def test_a_branch_does_not_spoil_the_trunk(target, make_head, load_head):
    """Two requests share blocks and continue differently; the last shared position's pair must be neither's own."""
    head = make_head("eagle3")
    engine = Engine(target, load_head(head))
    trunk = engine.sequence(2 * BLOCK + 1)
    engine.step((trunk, 2, None, 0))
    branch = engine.share(trunk, 2, 2, more=2)
    for _ in range(3):
        for sequence in (branch, trunk):
            (drafts,) = engine.step((sequence, 3, None, 1))
            head.check_greedy(sequence.request.tokens, drafts.token_ids)


def test_states_of_steps_without_drafts_are_kept(target, make_head, load_head):
    """A request that wants no drafts is kept too: others may share its blocks."""
    head = make_head("eagle3")
    engine = Engine(target, load_head(head))
    sequence = engine.sequence(60, SamplingParams(temperature=0.0, speculative=False))
    for _ in range(12):
        engine.step((sequence, 0, None, 0))
    branch = engine.share(sequence, 15, 0, more=1)
    (drafts,) = engine.step((branch, 2, None, 0))
    head.check_greedy(branch.request.tokens, drafts.token_ids)


def test_reused_blocks_keep_the_last_owners_states(target, make_head, load_head):
    """A block is reused between steps without drafts."""
    head = make_head("eagle3")
    engine = Engine(target, load_head(head))
    for _ in range(3):
        first = engine.sequence(7)
        engine.step((first, 0, None, 0))
        table = list(first.table)
        engine.release(first)
        second = engine.sequence(6)
        engine.step((second, 0, None, 0))
        assert set(second.table) <= set(table)
        (drafts,) = engine.step((second, 3, None, 0))
        head.check_greedy(second.request.tokens, drafts.token_ids)
        engine.release(second)


def test_a_row_that_lags_beyond_the_budget_catches_up_later(target, make_head, load_head):
    head = make_head("eagle")
    engine = Engine(target, load_head(head, budget=10))
    long, short = engine.sequence(30), engine.sequence(3)
    seen = []
    for _ in range(6):
        first, second = engine.step((long, 2, None, 0), (short, 2, None, 1))
        seen.append(len(first.token_ids))
        assert len(second.token_ids) == 2, "the short one does not wait"
        head.check_greedy(short.request.tokens, second.token_ids)
        head.check_greedy(long.request.tokens, first.token_ids)
    assert seen == [0, 0, 0, 0, 2, 2]


def test_drafts_end_with_the_heads_positions(target, make_head, load_head):
    head = make_head("eagle3", max_positions=16)
    engine = Engine(target, load_head(head))
    sequence = engine.sequence(14)
    (drafts,) = engine.step((sequence, 6, None, 0))
    assert len(drafts.token_ids) == 3, "pairs up to position 15, of which the last one makes the last draft"
    head.check_greedy(sequence.request.tokens, drafts.token_ids)
    for _ in range(3):
        (drafts,) = engine.step((sequence, 6, None, 1))
    assert drafts.token_ids == []
