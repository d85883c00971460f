"""Training of UNO: what is guessed in training is what the target drafts with the exported files."""

import dataclasses

import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError
from outrider.spec_decode.drafters.uno import noise_token
from outrider.spec_decode.training.build import new_drafter
from outrider.spec_decode.training.methods import target_lora

from ....uno_reference import UnoReference
from .conftest import VOCAB

K = 3


@pytest.fixture
def make(options, samples, read_batch):
    """make(adapter) -> a drafter with a random LoRA, its target, and the features of some samples."""

    def make(adapter=None, **more):
        target, features = read_batch(samples[:4], adapter=adapter)
        drafter = new_drafter(options("uno", block_size=K, rank=4, **more), target, samples)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in drafter.parameters():
                drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                parameter.copy_(drawn.bfloat16())  # as in files
        return drafter, target, features

    return make


@pytest.mark.parametrize("adapter", [False, True])
def test_guesses_are_the_drafts_of_the_exported_files(make, folders, samples, tmp_path, adapter):
    """With an adapter the text is read under it, and the noise is not."""
    drafter, _, features = make(folders.adapter if adapter else None)
    drafter.eval().export(tmp_path)
    guesses = drafter.guesses(features, K + 1)
    base = LlamaForCausalLM.from_pretrained(folders.target)
    reads_noise = PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    model = LlamaForCausalLM.from_pretrained(folders.target)
    if adapter:
        model = PeftModel.from_pretrained(model, folders.adapter).merge_and_unload()
    reference = UnoReference(model, reads_noise, lambda position: noise_token(position, VOCAB))
    labels = features.labels
    checked = 0
    for row, position, found in zip(labels.rows.tolist(), labels.positions.tolist(), guesses.tolist(), strict=True):
        for draft, guess in enumerate(found):
            anchor = position - draft
            assert (guess == -1) == (anchor < 1 or draft >= K)
            if guess >= 0 and position % 3 == 0:
                logits = reference.logits(samples[row].token_ids[: anchor + 1], K)[draft]
                assert logits[guess] >= logits.max() - 1e-3
                checked += draft > 0
    assert checked > 10


def test_loss_is_the_weighted_mean_over_the_guesses(make):
    drafter, target, features = make()
    drafter.eval()
    anchors = target_lora.draw_anchors(features.labels, features.ids, target_lora.ANCHORS)
    losses = []
    for states, index in drafter.steps(features, drafter.read(features), anchors, K):
        wanted = target.head.logits(features.labels.states[index]).softmax(-1)
        losses.append(float(F.cross_entropy(states @ target.lm_head.T, wanted).detach()))
    assert len(losses) == K - 1
    assert float(drafter.loss(features).detach()) == pytest.approx((losses[0] + 0.8 * losses[1]) / 1.8, abs=1e-4)


def test_the_target_stays_as_it_is_and_training_reads_other_noise(make):
    drafter, target, features = make()
    before = [parameter.clone() for parameter in target.decoder.parameters()]
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.01)
    drafter.train()
    losses = []
    for _ in range(15):
        loss = drafter.loss(features)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.15
    assert all(map(torch.equal, before, target.decoder.parameters()))
    assert torch.equal(target.decoder(features.ids).last_hidden_state, features.hidden)
    positions = torch.arange(50)[None]
    drawn = [drafter._draw_noise(positions).tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    drafter.eval()
    assert drafter._draw_noise(positions).tolist() == [[noise_token(position, VOCAB) for position in range(50)]]


def test_targets_that_a_mask_does_not_fit_are_refused(options, samples, read_batch):
    target, _ = read_batch(samples[:1])
    target.config = dataclasses.replace(target.config, windows=(64, None, 64, None))
    with pytest.raises(UnsupportedModelError, match="a sliding window of 64 tokens, less than --max-length"):
        new_drafter(options("uno"), target, samples)
    with pytest.raises(InvalidRequestError, match="muon is for the matrices of heads, of which uno trains none"):
        options("uno", optimizer="muon")
