"""DFlash and DSpark drafters in every format against a plain dense forward pass of the same tensors in float64."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.noise import ROUND, Stream, row_keys
from outrider.kernels.noise.torch import gumbel
from outrider.kernels.sampling import filter_logits
from outrider.models.attention.torch import TorchAttention
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.engine.weights import check_shapes
from outrider.spec_decode.drafters.dflash import head as dflash_head

from ....block_heads import BlockHead
from ..schedules import Engine, random_schedule

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
DFLASH = {
    "shares all": {},
    "speculators": {"speculators": True, "draft_vocab": 61, "prefix": "model."},
    "deepseek's, from the anchor": {"deepspec": True, "from_anchor": True, "own_embedding": True, "own_head": True},
    "smaller": {"hidden": 24, "own_embedding": True, "draft_vocab": 50},
    "mask embedding": {"mask_embedding": True},
    "biases, other layers": {"attention_bias": True, "aux": (3, 0, 2), "layers": 3},
    "one layer of the target": {"aux": (2,), "layers": 1},
    "causal": {"fields": {"causal": True}},
    "sliding layers": {"layer_types": SLIDING, "layers": 3, "window": 6},
    "all in windows": {"fields": {"use_swa": True, "swa_window_size": 4}, "layers": 1, "window": 4},
}
DSPARK = {
    "vanilla": {},
    "gated": {"kind": "gated", "confidence_reads_markov": False},
    "rnn": {"kind": "rnn", "deepspec": True},
    "speculators": {"speculators": True, "draft_vocab": 61},
    "not from the anchor": {"fields": {"sample_from_anchor": False}, "from_anchor": False},
    "rnn of fewer tokens": {"kind": "rnn", "draft_vocab": 40, "speculators": True},
}
VARIANTS = [("dflash", o) for o in DFLASH.values()] + [("dspark", o) for o in DSPARK.values()]
NAMES = [f"dflash: {n}" for n in DFLASH] + [f"dspark: {n}" for n in DSPARK]
WINDOWED = DFLASH["all in windows"]


@pytest.fixture
def make(target, load_head, tmp_path):
    """make(method, **options) -> the reference and the drafter."""

    def make(method, speculative=None, **options):
        head = BlockHead(target, method, **options)
        if options == WINDOWED:
            head.kinds = ["sliding_attention"]  # of the reference: config.json says it otherwise
        return head, load_head(head.save(tmp_path / "head"), method, **(speculative or {}))

    return make


@pytest.fixture(params=["best", "torch"])
def backend(request, monkeypatch):
    """The attention of this machine, and the reference's."""
    if request.param == "torch":
        monkeypatch.setattr(dflash_head, "make_attention", TorchAttention)


def test_weights_without_the_mask_embedding_of_those_in_use_are_refused(target, load_head, tmp_path):
    """It is in a file of its own: copying would keep the old one."""
    plain, other = (
        load_head(BlockHead(target, "dflash", mask_embedding=has).save(tmp_path / str(has)), "dflash").weights[0]
        for has in (False, True)
    )
    check_shapes(other, other)
    check_shapes(other, plain)
    with pytest.raises(InvalidRequestError, match="missing: mask_embedding"):
        check_shapes(plain, other)


@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=NAMES)
def test_drafts_are_those_of_a_plain_forward_pass(target, make, backend, method, options):
    head, drafter = make(method, **options)
    assert drafter.needs.aux_layers == tuple(index + 1 for index in head.aux)
    assert drafter.needs.max_drafts == head.max_drafts
    engine = Engine(target, drafter, is_rated=True)
    sequences = [engine.sequence(9), engine.sequence(4)]
    for accepted in (0, 3, 1):
        found = engine.step((sequences[0], 4, None, accepted), (sequences[1], 2, None, accepted))
        for sequence, drafts, count in zip(sequences, found, (4, 2), strict=True):
            assert len(drafts.token_ids) == count
            assert drafts.probs is None
            head.check_greedy(sequence.request.tokens, drafts.token_ids)
            logits, confidence = head.outputs(sequence.request.tokens, drafts.token_ids)
            if method == "dflash":
                confidence = [float(row.softmax(-1).max()) for row in logits]
            assert drafts.confidence == pytest.approx(confidence, abs=1e-5)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_what_is_drafted_depends_on_every_tensor(target, method):
    """Guards the test above: with any tensor changed, the dense pass gives other logits."""
    head = BlockHead(target, method, own_embedding=True, own_head=True, attention_bias=True, kind="rnn")
    tokens, drafts = list(range(3, 12)), [5, 6, 7]
    before, confidence = head.outputs(tokens, drafts)
    for name, tensor in head.weights.items():
        kept = tensor.clone()
        tensor.mul_(1.5).add_(0.05 * torch.randn(tensor.shape))
        logits, other = head.outputs(tokens, drafts)
        change = (torch.stack(logits) - torch.stack(before)).abs().max()
        assert other != confidence if name.startswith("confidence") else change > 1e-3, name
        tensor.copy_(kept)


def test_states_of_another_layer_are_noticed(target, make):
    """Guards the layer ids of the two formats, which differ by one."""
    head, drafter = make("dflash", speculators=True)
    engine = Engine(target, drafter)
    sequence = engine.sequence(12)
    head.aux = tuple(index - 1 for index in head.aux)
    missed = 0
    for _ in range(6):
        (drafts,) = engine.step((sequence, 4, None, 0))
        logits = head.logits(sequence.request.tokens, drafts.token_ids)
        missed += sum(
            bool(of_draft[d] < of_draft.max() - 0.01) for of_draft, d in zip(logits, drafts.token_ids, strict=True)
        )
    assert missed > 0


@pytest.mark.parametrize("rule", ["independent", "seeded", "invariant"])
@pytest.mark.parametrize(
    ("method", "options"), [("dflash", {}), ("dflash", {"draft_vocab": 40}), ("dspark", {"kind": "rnn"})]
)
def test_sampled_drafts_and_their_distribution(target, make, method, options, rule):
    fields = {"rejection_sample_method": "invariant"} if rule == "invariant" else {}
    head, drafter = make(method, fields, **options)
    engine = Engine(target, drafter)
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, seed=5 if rule == "seeded" else None)
    sequences = [engine.sequence(8, params), engine.sequence(5), engine.sequence(11, params)]
    engine.step(*((s, 3, None, 0) for s in sequences))
    engine.step(*((s, 4, None, 2) for s in sequences))
    head.check_greedy(sequences[1].request.tokens, sequences[1].drafts.token_ids)
    for sequence in (sequences[0], sequences[2]):
        ids, probs, *_ = sequence.drafts
        tokens = list(sequence.request.tokens)
        for i, logits in enumerate(head.logits(tokens, ids)):
            filtered = filter_logits(logits[None].float(), [0.8], [30], [0.9], [0.01])
            stream, step = (Stream.DRAFT, ROUND) if rule == "independent" else (Stream.TARGET, 1)
            noise = gumbel(row_keys([sequence.request.seed_key], [len(tokens) * step + i], stream), filtered.shape[1])
            assert ids[i] == int((filtered.log_softmax(-1) + noise).argmax())
            if rule == "independent":
                torch.testing.assert_close(probs[i], filtered.softmax(-1)[0], atol=1e-4, rtol=1e-3)
        assert (probs is None) == (rule != "independent")


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_any_schedule_gives_the_same_drafts(target, decoder, tmp_path_factory, method, seed):
    """Chunks, spells without drafts, any acceptance, shared blocks, preemption: never a draft less, none other."""
    from outrider.platform.core.speculative_config import parse_speculative
    from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter

    head = BlockHead(target, method)
    path = head.save(tmp_path_factory.mktemp("head"))
    config = parse_speculative({"method": method, "model": str(path), "adaptive": False})
    drafter = make_drafter(config, DrafterContext(target=decoder, device="cpu", dtype="float32", max_model_len=256))
    rng = random.Random(seed)
    random_schedule(Engine(target, drafter, rng), head, rng, steps=14, whole=True)


def test_a_row_without_room_for_its_block_gets_fewer_drafts(target, make):
    head, drafter = make("dflash")
    engine = Engine(target, drafter)
    engine.reserve = lambda sequence, count: Engine.reserve(engine, sequence, min(count, 12))
    sequence = engine.sequence(9)
    (drafts,) = engine.step((sequence, 4, None, 0))
    assert len(drafts.token_ids) == 2  # of positions 9 to 11, one is the last token's
    head.check_greedy(sequence.request.tokens, drafts.token_ids)


def test_nothing_is_drafted_beyond_the_drafters_positions(target, make):
    head, drafter = make("dflash", max_positions=14)
    engine = Engine(target, drafter)
    sequence = engine.sequence(9)
    counts = []
    for _ in range(5):
        (drafts,) = engine.step((sequence, 4, None, 0))
        head.check_greedy(sequence.request.tokens, drafts.token_ids)
        counts.append(len(drafts.token_ids))
    assert counts == [4, 3, 2, 1, 0]


def test_logits_of_few_drafts_at_a_time(target, make, monkeypatch):
    from outrider.spec_decode.drafters import one_pass as module

    monkeypatch.setattr(module, "MAX_LOGITS_BYTES", 4 * 97 * 3)
    head, drafter = make("dspark")
    engine = Engine(target, drafter)
    sequences = [engine.sequence(9), engine.sequence(4)]
    for drafts, sequence in zip(
        engine.step((sequences[0], 5, None, 0), (sequences[1], 3, None, 0)), sequences, strict=True
    ):
        head.check_greedy(sequence.request.tokens, drafts.token_ids)
