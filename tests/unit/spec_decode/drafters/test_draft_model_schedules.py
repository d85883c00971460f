"""A draft model under schedules made at random: its drafts are those of a plain forward pass over the very tokens."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.checkpoint.loader import load_model
from outrider.spec_decode.drafters.draft_model import DraftModelDrafter

from ..schedules import BLOCK, Engine, random_schedule, small_llama

VOCAB = 97


class NoTarget:
    """Replaces a target: a draft model reads nothing of it."""

    vocab_size = VOCAB

    def states(self, tokens: list[int]) -> list[torch.Tensor]:
        return []


class Reference:
    """The draft model in transformers."""

    def __init__(self, path) -> None:
        self.path, self.model = path, small_llama(path, VOCAB)

    @torch.inference_mode()
    def check_greedy(self, tokens: list[int], drafts: list[int]) -> None:
        """Each draft is the most likely token after `tokens` and the drafts before it, up to rounding."""
        logits = self.model(torch.tensor([tokens + drafts])).logits[0, len(tokens) - 1 :]
        for at, draft in enumerate(drafts):
            assert logits[at, draft] >= logits[at].max() - 1e-4


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return Reference(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def model(reference):
    return load_model(reference.path, dtype="float32")


def make_engine(model, budget: int, rng: random.Random) -> Engine:
    return Engine(NoTarget(), DraftModelDrafter(model, max_num_batched_tokens=budget), rng, drafts_count=True)


@pytest.mark.slow
def test_any_schedule_leaves_the_drafts_as_they_are(reference, model):
    @settings(max_examples=25)
    @given(st.integers(0, 2**32), st.sampled_from([5, 2048]))
    def check(seed, budget):
        rng = random.Random(seed)
        random_schedule(make_engine(model, budget, rng), reference, rng, steps=12, whole=budget > 100)

    check()


@pytest.mark.parametrize("drafted", [0, 1, 2])
def test_shared_blocks_are_read_as_far_as_they_were_computed(reference, model, drafted):
    """`drafted` of two shared blocks have draft KV; the rest must be computed."""
    engine = make_engine(model, 2048, random.Random(0))
    trunk = engine.sequence(2 * BLOCK + 1)
    engine.step((trunk, 2, None, 0))
    branch = engine.share(trunk, 2, drafted, more=2)
    for layer in engine.kv:  # their uncomputed slots hold anything
        layer.k[:, branch.table[drafted:]] = layer.v[:, branch.table[drafted:]] = 9.0
    for _ in range(3):
        (drafts,) = engine.step((branch, 3, None, 1))
        assert len(drafts.token_ids) == 3
        reference.check_greedy(branch.request.tokens, drafts.token_ids)
