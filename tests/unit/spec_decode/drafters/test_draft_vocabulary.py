"""Draft models with another tokenizer than the target's: tokens are translated by their texts, both ways."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from outrider.kernels.sampling import filter_logits
from outrider.models.checkpoint.vocabulary import translation
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters.draft_model import check
from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter

from ..schedules import Engine, random_schedule, small_llama

VOCAB, DRAFT_VOCAB, LACKING = 97, 80, range(60, 80)
"""The draft model has the target's tokens but those that it is lacking, in another order, and 3 of its own."""


def write_tokenizer(folder, vocabulary, added=()):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": list(added)}))
    return folder


def translate(tmp_path, one, other, sizes=(99, 99)):
    folders = [write_tokenizer(tmp_path / name, vocab) for name, vocab in (("one", one), ("other", other))]
    return translation(*folders, sizes)


def test_tokens_of_the_same_bytes_are_the_same(tmp_path):
    """One tokenizer's tokens are written as bytes of GPT-2's alphabet, the other's as pieces of SentencePiece."""
    one = {"Ġthe": 0, "Ġcat": 1, "Ċ": 2, "Ã©": 3, "cat": 4, "Ġdogs": 5, "Ġxyz": 6, "</s>": 7}
    other = {"▁cat": 0, "▁the": 1, "<0x0A>": 2, "</s>": 3, "é": 4, "dogs": 5, "z": 6, "yz": 7, "▁own": 8}
    found = translate(tmp_path, one, other)
    assert found.common == [0, 1, 2, 3, 7]
    assert found.theirs == [1, 0, 2, 4, 3]
    assert found.stand_ins[:8] == [1, 0, 2, 4, 0, 5, 7, 3], "the longest end, or the first token"
    assert found.stand_ins[8:] == [0] * 91
    assert found.share == 5 / 8


def test_tokens_beyond_the_embeddings_and_copies_do_not_count(tmp_path):
    found = translate(tmp_path, {"a": 0, "b": 1, "c": 2, "Ġc": 8}, {"c": 0, "b": 7, "<0x63>": 1, "▁c": 4}, (4, 5))
    assert (found.common, found.theirs) == ([2], [0])
    assert found.stand_ins == [0, 0, 0, 0]
    assert translate(tmp_path, {}, {"a": 0}) is None


def test_entries_that_are_no_tokens_do_not_count(tmp_path):
    """The file is damaged; and a token that is longer than any of the other's costs no time."""
    one, other = tmp_path / "one", tmp_path / "other"
    write_tokenizer(one, [["a", 0.0], [["b"], 0.0], ["c", 0.0], 3], [{"content": ["d"], "id": 4}, {"id": 5}, "e"])
    write_tokenizer(other, {"c": 0, "a": 1, "b": None})
    assert translation(one, other, (9, 9))[:2] == ([0, 2], [1, 0])
    found = translate(tmp_path, {"x" * 200_000 + "ab": 0, "ab": 1}, {"c": 0, "b": 1, "ab": 2})
    assert found.stand_ins[:2] == [2, 2]


class Reference:
    """A draft model in transformers that reads translated tokens."""

    def __init__(self, folder):
        self.model = small_llama(folder, DRAFT_VOCAB)
        rng = random.Random(1)
        self.common = [token for token in range(VOCAB) if token not in LACKING]
        own = rng.sample(range(DRAFT_VOCAB), DRAFT_VOCAB)
        self.draft_id = dict(zip(self.common, own, strict=False))
        texts = {draft: f"▁t{token}" for token, draft in self.draft_id.items()}
        write_tokenizer(folder, {texts.get(i, f"own{i}"): i for i in range(DRAFT_VOCAB)})

    @torch.inference_mode()
    def logits(self, tokens, drafts):
        """[V] before each of `drafts`: of the tokens that both have."""
        read = [self.draft_id.get(token, 0) for token in [*tokens, *drafts]]
        found = self.model(torch.tensor([read])).logits[0, len(tokens) - 1 : len(tokens) + len(drafts) - 1].float()
        wide = torch.full((len(found), VOCAB), -torch.inf)
        wide[:, self.common] = found[:, [self.draft_id[token] for token in self.common]]
        return wide

    def check_greedy(self, tokens, drafts):
        for logits, draft in zip(self.logits(tokens, drafts), drafts, strict=True):
            assert logits[draft] >= logits.max() - 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    draft = tmp_path_factory.mktemp("draft")
    reference = Reference(draft)
    target = write_tokenizer(tmp_path_factory.mktemp("target"), {f"Ġt{token}": token for token in range(VOCAB)})
    return target, draft, reference


def load(folders, vocab_size=VOCAB, **fields):
    target, draft, _ = folders
    context = DrafterContext(
        target=SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size)),
        model_path=str(target),
        device="cpu",
        dtype="float32",
    )
    config = {"method": "draft_model", "model": str(draft), "adaptive": False, **fields}
    return make_drafter(parse_speculative(config), context)


class NoTarget:
    vocab_size = VOCAB

    def states(self, tokens):
        return []


@pytest.mark.parametrize("switch", [{}, {"use_heterogeneous_vocab": True}])
def test_drafts_are_common_tokens_after_translated_ones(folders, caplog, switch):
    """Under schedules made at random, among tokens that the draft model lacks."""
    drafter = load(folders, **switch)
    assert "77 tokens that both have, 96.2% of the smaller" in caplog.text
    for seed in range(4):
        rng = random.Random(seed)
        engine = Engine(NoTarget(), drafter, rng, drafts_count=True)
        random_schedule(engine, folders[2], rng, steps=12, whole=True)


def test_probabilities_are_those_of_the_common_tokens(folders):
    engine = Engine(NoTarget(), load(folders), drafts_count=True)
    sequence = engine.sequence(9, SamplingParams(temperature=0.8, top_k=30))
    (drafts,) = engine.step((sequence, 3, None, 0))
    for logits, q in zip(folders[2].logits(sequence.request.tokens, drafts.token_ids), drafts.probs, strict=True):
        assert torch.allclose(q, filter_logits(logits[None], [0.8], [30], [1.0], [0.0]).softmax(-1)[0], atol=1e-5)
        assert q[[*LACKING]].sum() == 0
        assert q.sum() == pytest.approx(1.0)


def test_tokenizers_with_little_in_common_are_refused(folders, tmp_path):
    """At the start, from the files alone; with both shares."""
    _, draft, _ = folders
    target = write_tokenizer(tmp_path / "t", {f"Ġt{t}" if t < 30 else f"Ġx{t}": t for t in range(VOCAB)})
    config = parse_speculative({"method": "draft_model", "model": str(draft)})
    with pytest.raises(InvalidRequestError, match=r"80 tokens.* 97.*agree: 0\.0%.*same text: 37\.5%.*50%"):
        check(config, SimpleNamespace(vocab_size=VOCAB), target)
    with pytest.raises(InvalidRequestError, match=r"same text: 37\.5%"):
        load((target, draft, None))
    check(config, SimpleNamespace(vocab_size=VOCAB), folders[0])


def test_vllms_switches_are_for_one_method():
    with pytest.raises(InvalidRequestError, match=r"use_heterogeneous_vocab is for method draft_model"):
        parse_speculative({"method": "ngram", "use_heterogeneous_vocab": True})
    assert parse_speculative({"method": "ngram", "use_heterogeneous_vocab": False}).method == "ngram"
    with pytest.raises(InvalidRequestError, match=r"parallel_drafting must be true or false, got 3"):
        parse_speculative({"method": "eagle3", "model": "m", "parallel_drafting": 3})
    for model in ("org/X-p-eagle", "org/P-EAGLE-X", "org/X-speculator.peagle"):
        assert parse_speculative({"model": model, "parallel_drafting": True}).method == "eagle3"
