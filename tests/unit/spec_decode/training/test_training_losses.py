"""The losses by their definitions, chunks and windows that change nothing, and where heads begin."""

import torch
from torch.nn import functional as F

from outrider.spec_decode.training import drafter as drafter_module
from outrider.spec_decode.training.build import new_drafter
from outrider.spec_decode.training.data import collate
from outrider.spec_decode.training.drafter import greedy_tokens, soft_cross_entropy, weighted_mean


def test_soft_cross_entropy_in_chunks(monkeypatch):
    hidden, head = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    target, weights = torch.randn(7, 11), torch.tensor([1.0, 1, 0.5, 1, 0.25, 1, 1])
    each = F.cross_entropy(hidden @ head.T, target.softmax(-1), reduction="none")
    wanted = (each * weights).sum() / weights.sum()
    wanted_gradients = torch.autograd.grad(wanted, (hidden, head))
    for elements in (1 << 20, 22, 1):
        monkeypatch.setattr(drafter_module, "_CHUNK_ELEMENTS", elements)
        loss = soft_cross_entropy(lambda rows: rows @ head.T, hidden, target, weights)
        assert torch.allclose(loss, wanted)
        for got, expected in zip(torch.autograd.grad(loss, (hidden, head)), wanted_gradients, strict=True):
            assert torch.allclose(got, expected, atol=1e-6)
        tokens = greedy_tokens(lambda rows: rows @ head.T, hidden, 11)
        assert torch.equal(tokens, (hidden @ head.T).argmax(-1))


def test_weighted_mean():
    losses = iter([torch.tensor(1.0), torch.tensor(3.0), torch.tensor(5.0)])
    assert abs(float(weighted_mean(losses, 0.5)) - (1 + 1.5 + 1.25) / 1.75) < 1e-6


def test_loss_is_the_mean_over_steps_and_labels(options, samples, read_batch):
    """EAGLE-3's, recomputed from the states of each step, one label at a time."""
    target, features = read_batch(samples[:5], None)
    head = new_drafter(options(unroll=3, step_decay=0.5), target, samples)
    losses = []
    for states, index in head.steps(features, 3):
        logits = head.logits(states)
        wanted = features.labels.logits[index].softmax(-1)
        losses.append(
            float(torch.stack([-(q * x.log_softmax(-1)).sum() for q, x in zip(wanted, logits, strict=True)]).mean())
        )
    expected = (losses[0] + 0.5 * losses[1] + 0.25 * losses[2]) / 1.75
    assert abs(float(head.loss(features)) - expected) < 1e-4


def test_what_prompts_weigh_does_not_change_guesses(options, samples, read_batch):
    """With prompts the windows of roots begin elsewhere; rows of different lengths."""
    target, features = read_batch(samples[:6], None)
    head = new_drafter(options(), target, samples).eval()
    wide = target.features(collate(samples[:6], torch.device("cpu"), prompt_weight=0.5))
    pairs = [list(zip(f.labels.rows.tolist(), f.labels.positions.tolist(), strict=True)) for f in (features, wide)]
    assert len(pairs[1]) > len(pairs[0])
    at = torch.tensor([pairs[1].index(pair) for pair in pairs[0]])
    assert torch.equal(head.guesses(wide, 4)[at], head.guesses(features, 4))
    assert wide.labels.weights.unique().tolist() == [0.5, 1.0]
    assert float(head.loss(wide)) != float(head.loss(features))


def test_a_head_begins_as_the_targets_last_layer(options, samples, read_batch):
    target, _ = read_batch(samples[:1], None)
    head = dict(new_drafter(options(intermediate_size=20), target, samples).named_parameters())
    last = target._causal.base_model.layers[-1]
    assert torch.equal(head["layers.0.mlp.up_proj.weight"], last.mlp.up_proj.weight[:20])
    assert torch.equal(head["layers.0.mlp.down_proj.weight"], last.mlp.down_proj.weight[:, :20])
    assert torch.equal(head["layers.0.self_attn.q_proj.weight"][:, 32:], last.self_attn.q_proj.weight)
    assert torch.equal(head["layers.0.self_attn.o_proj.weight"], last.self_attn.o_proj.weight)
    assert torch.equal(head["norm.weight"], target._causal.base_model.norm.weight)


def test_eagle_learns_states_and_tokens(options, samples, read_batch):
    target, features = read_batch(samples[:5], ())
    both, states_only = (
        new_drafter(options("eagle", unroll=1, feature_noise=0.0, token_weight=w), target, samples) for w in (0.1, 0.0)
    )
    states, index = next(both.steps(features, 1))
    labels = features.labels
    wanted = features.hidden[labels.rows[index], labels.positions[index]]
    regression = float(F.smooth_l1_loss(states, wanted))
    tokens = float(F.cross_entropy(states @ target.lm_head.T, labels.logits[index].softmax(-1)))
    assert abs(float(states_only.loss(features)) - regression) < 1e-4
    assert abs(float(both.loss(features)) - regression - 0.1 * tokens) < 1e-4
