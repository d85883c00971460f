"""Training of DFlash and DSpark drafters: what is guessed in training is what the exported files draft."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from outrider.platform.core.errors import InvalidRequestError
from outrider.spec_decode.training.build import new_drafter
from outrider.spec_decode.training.methods import block_head
from outrider.spec_decode.training.methods.block_head import draw_anchors

from ....block_heads import BlockHead

K = 3


class Target:
    """A training target, as the reference reads it."""

    def __init__(self, target) -> None:
        self.model, config = target._causal, target.config
        self.vocab_size, self.num_layers, self.hidden_size = config.vocab_size, config.num_layers, config.hidden_size
        self.embedding, self.head = target.embeddings, target.lm_head

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[torch.Tensor]:
        output = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        return [state[0] for state in output.hidden_states]


@pytest.fixture
def make_drafter(options, samples, read_batch):
    """make_drafter(method) -> a drafter with random weights, the target, and the features of some samples."""

    def make(method, **more):
        target, features = read_batch(samples[:4], None)
        sizes = {"block_size": K + (method == "dflash"), "draft_layers": 2, "head_dim": 8} | more
        drafter = new_drafter(options(method, **sizes), target, samples)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                scale = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
        return drafter, target, features

    return make


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_guesses_are_the_drafts_of_the_exported_files(make_drafter, samples, tmp_path, method):
    drafter, target, features = make_drafter(method)
    drafter.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    reference = BlockHead(Target(target), method, aux=tuple(config["dflash_config"]["target_layer_ids"]))
    reference.mask, reference.theta = config["dflash_config"]["mask_token_id"], config["rope_theta"]
    reference.rank = config.get("markov_rank", 0)
    reference.weights = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert config["num_hidden_layers"] == reference.num_layers == 2
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():  # files are in bfloat16
            parameter.copy_(reference.weights[name])
        guesses = drafter.eval().guesses(features, K)
    labels, wrong = features.labels, 0
    for row, position, found in zip(labels.rows.tolist(), labels.positions.tolist(), guesses.tolist(), strict=True):
        text = samples[row].token_ids
        for draft, guess in enumerate(found):
            anchor = position - draft
            assert (guess == -1) == (anchor < 1)
            if anchor >= 1 and position % 5 == 0:
                logits = reference.logits(text[: anchor + 1], (text + [0] * K)[anchor + 1 : anchor + 1 + K])[draft]
                wrong += bool(logits[guess] < logits.max() - 1e-3)
    assert wrong == 0


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_loss_is_the_weighted_mean_over_the_drafts(make_drafter, method, monkeypatch):
    drafter, target, features = make_drafter(method)
    monkeypatch.setattr(type(drafter), "_confidence_loss", lambda self, *args: torch.zeros(()))
    drafter.eval()
    anchors = draw_anchors(features.labels, features.ids, None)
    losses = []
    for states, index in drafter.steps(features, anchors, K):
        wanted = target.head.logits(features.labels.states[index]).softmax(-1)
        losses.append(float(F.cross_entropy(states @ drafter.output_weight.float().T, wanted).detach()))
    expected = (losses[0] + 0.8 * losses[1] + 0.64 * losses[2]) / 2.44
    assert float(drafter.loss(features).detach()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_long_texts_are_measured_in_parts(make_drafter, method, monkeypatch):
    """The mask of all blocks of a text at once grows with the square of its length."""
    drafter, _, features = make_drafter(method)
    monkeypatch.setattr(type(drafter), "_confidence_loss", lambda self, *args: torch.zeros(()))
    drafter.eval()
    whole = float(drafter.loss(features).detach())
    seen, states = [], type(drafter).states
    monkeypatch.setattr(
        type(drafter),
        "states",
        lambda self, f, anchors, n: seen.append(anchors.shape[1]) or states(self, f, anchors, n),
    )
    monkeypatch.setattr(block_head, "ANCHORS", 5)
    assert float(drafter.loss(features).detach()) == pytest.approx(whole, abs=1e-5)
    assert len(seen) > 1
    assert max(seen) <= 5


def test_confidence_learns_how_often_drafts_are_accepted(make_drafter):
    drafter, _, features = make_drafter("dspark")
    optimizer = torch.optim.Adam(drafter.confidence_head.parameters(), lr=0.05)
    steps, weight = drafter.steps(features, draw_anchors(features.labels, features.ids, None), K), drafter.output_weight
    losses = []
    for _ in range(30):
        torch.manual_seed(0)  # the same drafts are chosen
        loss = drafter._confidence_loss(steps, weight, features)
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05


def test_anchors_are_positions_with_labels(make_drafter):
    _, _, features = make_drafter("dflash")
    labels = set(zip(features.labels.rows.tolist(), features.labels.positions.tolist(), strict=True))
    for most, before in ((None, 0), (3, 0), (None, 2)):
        anchors = draw_anchors(features.labels, features.ids, most, before)
        assert anchors.shape[1] <= (most or features.ids.shape[1])
        for row, positions in enumerate(anchors.tolist()):
            assert positions == sorted(positions)
            real = [position for position in positions if position]
            assert len(set(real)) == len(real) > 0
            for position in real:
                assert any((row, position + more) in labels for more in range(before + 1))


def test_a_mask_beyond_the_vocabulary_is_refused(make_drafter):
    with pytest.raises(InvalidRequestError, match="--mask-token-id 4096 is beyond the target's vocabulary of 2048"):
        make_drafter("dflash", mask_token_id=4096)
