"""P-EAGLE heads against a plain dense forward pass of the same tensors: all drafts from one pass with masks."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.weight_copy import copy_weights
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.drafters import one_pass

from ..schedules import Engine, check_sampled, random_schedule

MASK = 90
VARIANTS = {
    "one layer": {},
    "four layers, d2t": {"layers": 4, "draft_vocab": 40},
    "speculators": {"layers": 2, "speculators": True, "own_embedding": True, "norm_before_residual": True},
    "speculators, Qwen3": {"layers": 2, "speculators": True, "qk_norm": True, "aux": (1, 3), "fc_norm": True},
    "pard_token, one dimension before": {"layers": 2, "mask_field": "pard_token", "mask_shape": (1,), "bin": True},
    "mask_token_id, norms": {"mask_field": "mask_token_id", "norm_before_fc": True, "norm_output": True},
    "smaller": {"hidden": 24, "own_embedding": True, "draft_vocab": 50, "mask_shape": ()},
}


@pytest.fixture
def parallel(make_head):
    """parallel(**options) -> a P-EAGLE head"""
    return lambda **options: make_head("eagle3", mask_token=MASK, **options)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_drafts_are_those_of_a_plain_forward_pass(target, parallel, load_head, options):
    head = parallel(**options)
    engine = Engine(target, load_head(head))
    sequence = engine.sequence(9)
    for accepted, k in ((0, 4), (3, 1), (1, 5)):
        (drafts,) = engine.step((sequence, k, None, accepted))
        assert len(drafts.token_ids) == k
        head.check_greedy(sequence.request.tokens, drafts.token_ids)
        assert sequence.num_draft_computed == len(sequence.request.tokens)


def test_what_is_drafted_depends_on_the_mask(parallel):
    """Guards the test above: with another mask, the dense pass gives other logits to all drafts but the first."""
    head, tokens, drafts = parallel(layers=2, own_embedding=True), list(range(3, 12)), [5, 6, 7]
    before = torch.stack(head.logits(tokens, drafts))
    for tensor in (head.weights["mask_hidden"], head.weights["embed_tokens.weight"][MASK]):
        kept = tensor.clone()
        tensor.mul_(1.5).add_(0.5)
        changed = (torch.stack(head.logits(tokens, drafts)) - before).abs().amax(-1)
        assert changed[0] == 0
        assert (changed[1:] > 1e-2).all()
        tensor.copy_(kept)


def test_new_weights_have_a_new_mask(target, parallel, load_head, tmp_path):
    """The state of masks is computed once, and again from the weights that replace the head's."""
    engine, other = Engine(target, load_head(parallel(layers=2))), parallel(layers=2)
    for tensor in (other.weights["mask_hidden"], other.weights["fc.weight"]):
        tensor.mul_(1.5).add_(0.1)
    engine.step((engine.sequence(9), 3, None, 0))
    fresh = load_head(other.save(tmp_path / "other"), "eagle3")
    for new, held in zip(fresh.weights, engine.drafter.weights, strict=True):
        copy_weights(new, held)
    sequence = engine.sequence(9)
    for accepted in (0, 2):
        (drafts,) = engine.step((sequence, 4, None, accepted))
        other.check_greedy(sequence.request.tokens, drafts.token_ids)


def test_a_pass_makes_all_drafts(target, parallel, load_head, monkeypatch):
    drafter = load_head(parallel(layers=2))
    engine = Engine(target, drafter)
    passes, forward = [], drafter._head.forward
    monkeypatch.setattr(
        drafter._head, "forward", lambda batch, *args: passes.append(len(batch.input_ids)) or forward(batch, *args)
    )
    sequences = [engine.sequence(7), engine.sequence(4)]
    engine.step((sequences[0], 5, None, 0), (sequences[1], 2, None, 0))
    assert passes == [7 + 4 + 3 + 2], "tokens after the first with one new one, and a mask for each further draft"


@pytest.mark.parametrize("most", [1, 1 << 20])
def test_rows_of_different_lengths(target, parallel, load_head, monkeypatch, most):
    """With any number of products for the logits."""
    monkeypatch.setattr(one_pass, "MAX_LOGITS_BYTES", most)
    head = parallel(layers=2)
    engine = Engine(target, load_head(head))
    sequences = [engine.sequence(length) for length in (5, 11, 3, 8)]
    for ks in ((2, 5, 0, 1), (4, 0, 3, 3), (1, 1, 1, 2)):
        found = engine.step(*((s, k, None, 1) for s, k in zip(sequences, ks, strict=True)))
        for sequence, k, drafts in zip(sequences, ks, found, strict=True):
            assert len(drafts.token_ids) == k
            head.check_greedy(sequence.request.tokens, drafts.token_ids)


@pytest.mark.parametrize("rule", ["independent", "seeded", "invariant"])
def test_sampled_drafts_and_their_distribution(target, parallel, load_head, rule):
    head = parallel(layers=2, draft_vocab=40)
    fields = {"rejection_sample_method": "invariant"} if rule == "invariant" else {}
    engine = Engine(target, load_head(head, **fields))
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=5 if rule == "seeded" else None)
    sequences = [engine.sequence(8, params), engine.sequence(5), engine.sequence(11, params)]
    engine.step(*((s, 3, None, 0) for s in sequences))
    engine.step(*((s, k, None, 2) for s, k in zip(sequences, (4, 2, 3), strict=True)))
    check_sampled(sequences, head, target.vocab_size, rule)


@pytest.fixture
def loaded(parallel, load_head):
    made = {}

    def loaded(budget):
        if budget not in made:
            head = parallel(layers=2, draft_vocab=60)
            made[budget] = (head, load_head(head, budget=budget))
        return made[budget]

    return loaded


def test_any_schedule_leaves_the_drafts_as_they_are(target, loaded):
    """Keys and values of masks are never read by a later pass: prompts in chunks, steps without drafts, rejected
    drafts, shared blocks, preemption."""

    @settings(max_examples=12)
    @given(st.integers(0, 2**32), st.sampled_from([5, 2048]))
    def check(seed, budget):
        head, drafter = loaded(budget)
        rng = random.Random(seed)
        random_schedule(Engine(target, drafter, rng), head, rng, steps=12, whole=budget > 100)

    check()


def test_drafts_end_with_the_heads_positions(target, parallel, load_head):
    head = parallel(max_positions=16)
    engine = Engine(target, load_head(head))
    sequence = engine.sequence(14)
    (drafts,) = engine.step((sequence, 6, None, 0))
    assert len(drafts.token_ids) == 3, "masks up to position 15, of which the last one makes the last draft"
    head.check_greedy(sequence.request.tokens, drafts.token_ids)


def test_random_weights_need_no_files(target, parallel, load_head, tmp_path):
    path = parallel(layers=2).save(tmp_path / "head")
    (path / "model.safetensors").unlink()
    engine = Engine(target, load_head(path, "eagle3", load_format="dummy"))
    (drafts,) = engine.step((engine.sequence(6), 4, None, 0))
    assert len(drafts.token_ids) == 4
