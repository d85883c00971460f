"""The losses by their definitions, independent of chunks and windows, and heads' initial weights."""

import pytest
import torch
from torch.nn import functional as F

from outrider.spec_decode.training.build import new_drafter
from outrider.spec_decode.training.methods import base as drafter_module
from outrider.spec_decode.training.methods.base import Step, Wanted, greedy_tokens, soft_cross_entropy
from outrider.spec_decode.training.target import load_target

from .conftest import CPU, save_target

pytestmark = pytest.mark.slow


def test_soft_cross_entropy_in_chunks(monkeypatch):
    """Loss and gradients against the plain definition, for steps that guess at different labels, one at none."""
    weight, decay = torch.randn(11, 5, requires_grad=True), drafter_module.STEP_DECAY
    target = torch.randn(7, 11)
    indices = [torch.arange(7), torch.tensor([1, 2, 5, 6]), torch.tensor([], dtype=torch.long)]
    hidden = [torch.randn(len(index), 5, requires_grad=True) for index in indices]
    means = []
    for states, index in zip(hidden, indices, strict=True):
        each = F.cross_entropy(states @ weight.T, target[index].softmax(-1), reduction="none")
        means.append(each.mean() if len(index) else states.sum())
    plain = sum(decay**n * mean for n, mean in enumerate(means)) / sum(decay**n for n in range(3))
    gradients = torch.autograd.grad(3 * plain, (*hidden, weight))
    for elements in (1 << 20, 22, 1):
        monkeypatch.setattr(drafter_module, "_CHUNK_ELEMENTS", elements)
        wanted = Wanted(7, lambda first, last: target[first:last].softmax(-1))
        steps = [Step(states, index) for states, index in zip(hidden, indices, strict=True)]
        loss = soft_cross_entropy(steps, weight, wanted)
        assert torch.allclose(loss, plain)
        for got, expected in zip(torch.autograd.grad(3 * loss, (*hidden, weight)), gradients, strict=True):
            assert torch.allclose(got, expected, atol=1e-6)
        tokens = greedy_tokens(lambda rows: rows @ weight.T, hidden[0], 11)
        assert torch.equal(tokens, (hidden[0] @ weight.T).argmax(-1))


def test_a_draft_vocabulary_changes_the_softmax_alone(options, samples, read_batch):
    """The loss over fewer tokens is the plain one of the labels whose next token is among them."""
    target, features = read_batch(samples[:5], None)
    head = new_drafter(options(unroll=2, draft_vocab_size=8), target, samples)
    tokens, greedy = head.vocabulary, features.next_tokens
    assert 0 < torch.isin(greedy, tokens).sum() < len(greedy)
    assert torch.equal(head.lm_head_weight, target.lm_head[tokens])
    losses = []
    for states, index in head.steps(features, 2):
        kept = torch.isin(greedy[index], tokens)
        wanted = target.head.logits(features.labels.states[index[kept]])[:, tokens].softmax(-1)
        losses.append(float(F.cross_entropy(head.logits(states[kept]), wanted).detach()))
    assert abs(float(head.loss(features).detach()) - (losses[0] + 0.8 * losses[1]) / 1.8) < 1e-4


def test_loss_is_the_mean_over_steps_and_labels(options, samples, read_batch):
    """EAGLE-3's, recomputed from the states of each step, one label at a time."""
    target, features = read_batch(samples[:5], None)
    head = new_drafter(options(unroll=3), target, samples)
    losses = []
    for states, index in head.steps(features, 3):
        logits = head.logits(states)
        wanted = target.head.logits(features.labels.states[index]).softmax(-1)
        losses.append(
            float(torch.stack([-(q * x.log_softmax(-1)).sum() for q, x in zip(wanted, logits, strict=True)]).mean())
        )
    expected = (losses[0] + 0.8 * losses[1] + 0.64 * losses[2]) / 2.44
    assert abs(float(head.loss(features)) - expected) < 1e-4


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_text_in_a_batch_is_computed_as_alone(options, samples, read_batch, method):
    """Texts of other lengths, which share rows with it in training, change neither its states nor its gradients."""
    layers = None if method == "eagle3" else ()
    target, together = read_batch(samples[:5], layers)
    head = new_drafter(options(method, unroll=3), target, samples).eval()
    alone = [read_batch([sample], layers)[1] for sample in samples[:5]]
    assert len({len(sample.token_ids) for sample in samples[:5]}) > 2
    whole = list(head.steps(together, 3))
    parts = [list(head.steps(features, 3)) for features in alone]
    total = 0
    for number, (states, index) in enumerate(whole):
        firsts = torch.tensor([0, *(len(features.labels.rows) for features in alone)]).cumsum(0)
        apart = [steps[number] for steps in parts]
        assert torch.equal(index, torch.cat([i + first for (_, i), first in zip(apart, firsts, strict=False)]))
        joined = torch.cat([hidden for hidden, _ in apart])
        assert torch.allclose(states, joined, atol=1e-5)
        total = total + (states - joined).sum()
    gradients = torch.autograd.grad(total, [p for p in head.parameters() if p.requires_grad], allow_unused=True)
    assert all(g is None or g.abs().max() < 1e-3 for g in gradients)


def test_a_head_begins_as_the_targets_last_layer(options, samples, read_batch):
    target, features = read_batch(samples[:1], None)
    drafter = new_drafter(options(intermediate_size=20), target, samples)
    assert torch.equal(drafter.start(features), features.aux[-1])
    first, last = (target._causal.base_model.layers[layer] for layer in (0, -1))
    with torch.no_grad():
        first.input_layernorm.weight.mul_(2), last.input_layernorm.weight.mul_(3)
    head = dict(new_drafter(options(intermediate_size=20), target, samples).named_parameters())
    assert torch.equal(head["layers.0.input_layernorm.weight"], first.input_layernorm.weight)
    assert torch.equal(head["layers.0.hidden_norm.weight"], last.input_layernorm.weight)
    assert torch.equal(head["layers.0.mlp.up_proj.weight"], last.mlp.up_proj.weight[:20])
    assert torch.equal(head["layers.0.mlp.down_proj.weight"], last.mlp.down_proj.weight[:, :20])
    assert torch.equal(head["layers.0.self_attn.q_proj.weight"][:, 32:], last.self_attn.q_proj.weight)
    assert torch.equal(head["layers.0.self_attn.o_proj.weight"], last.self_attn.o_proj.weight)
    assert torch.equal(head["norm.weight"], target._causal.base_model.norm.weight)


def test_a_large_vocabulary_is_reduced_by_default(options, samples, tmp_path):
    save_target(tmp_path / "large", vocab_size=20_000)
    target = load_target(str(tmp_path / "large"), None, torch.float32, CPU, None)
    drafter = new_drafter(options(model=str(tmp_path / "large")), target, samples)
    assert drafter.vocabulary is not None
    assert len(drafter.vocabulary) == 8192
    whole = new_drafter(options(model=str(tmp_path / "large"), draft_vocab_size=20_000), target, samples)
    assert whole.vocabulary is None


def test_eagle_learns_states_and_tokens(options, samples, read_batch):
    target, features = read_batch(samples[:5], ())
    head = new_drafter(options("eagle", unroll=1), target, samples).eval()  # without noise
    states, index = next(head.steps(features, 1))
    labels = features.labels
    wanted = features.hidden[labels.rows[index], labels.positions[index]]
    regression = float(F.smooth_l1_loss(states, wanted))
    tokens = float(F.cross_entropy(states @ target.lm_head.T, target.head.logits(labels.states[index]).softmax(-1)))
    assert abs(float(head.loss(features)) - regression - 0.1 * tokens) < 1e-4
