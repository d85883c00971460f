"""Speculation never changes the text: byte equality, and frequencies if the text is random."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import SamplingParams
from outrider.platform.core import speculative_config
from outrider.platform.core.messages import EngineRequest
from outrider.platform.core.speculative_config import IN_TARGET_METHODS, MODEL_METHODS, RECORDED_METHODS

METHODS = [method for method in speculative_config.METHODS if method not in (*IN_TARGET_METHODS, *RECORDED_METHODS)]
"""Every method for which `models.speculative` has weights, or that needs none."""
GROUP = ("ngram", "draft_model", "eagle3", "dflash", "uno")
"""Methods of one half of the cases below; the others, new ones too, are the other half."""
NAMES = [None, "a", "b", None, "a", "c"]
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def text(outcomes):
    return [(o.token_ids, o.finish_reason, o.stop_reason) for o in outcomes]


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, seed=42, max_tokens=24),
    "filtered": SamplingParams(temperature=1.1, top_k=12, top_p=0.9, min_p=0.02, seed=-9, max_tokens=24),
    "penalised": SamplingParams(
        temperature=0.7,
        seed=1,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        min_tokens=6,
        max_tokens=24,
        logit_bias={5: 4.0, 1: 3.0},
        bad_words_token_ids=[[6], [7, 8]],
    ),
    "restricted": SamplingParams(temperature=0, allowed_token_ids=[*range(3, 12)], stop_token_ids=[9], max_tokens=24),
}


@pytest.fixture(scope="session")
def plain_text(models, plain_engine, run, prompts):
    """plain_text(name in PARAMS, adapters) -> the text without speculation; made once."""
    made = {}

    def plain_text(name, adapters):
        if (name, adapters) not in made:
            names = NAMES if adapters else [None] * len(prompts)
            work = [(p, PARAMS[name], models.lora(n)) for p, n in zip(prompts, names, strict=True)]
            made[name, adapters] = text(run(plain_engine, work))
        return made[name, adapters]

    return plain_text


@pytest.fixture
def same_text(run, jobs, plain_text):
    """same_text(engine, names in PARAMS, adapters): asserts that its text is the one without speculation; all of
    it in one batch, which takes a fraction of the steps."""

    def same_text(engine, names, adapters):
        outcomes = iter(text(run(engine, [job for name in names for job in jobs(PARAMS[name], adapters)])))
        for name in names:
            want = plain_text(name, adapters)
            assert list(itertools.islice(outcomes, len(want))) == want, name

    return same_text


@pytest.mark.parametrize(
    ("method", "k"), [*((method, 5) for method in METHODS), *((method, 1) for method in ("suffix", "eagle", "medusa"))]
)
def test_text_is_byte_equal_with_and_without(models, make_engine, same_text, method, k):
    drafted = make_engine(speculative_config=models.speculative(method, k), max_num_seqs=24)
    same_text(drafted, list(PARAMS), False)
    counts = [entry.counts for entry in drafted.stats().speculation]
    assert sum(c.num_accepted_tokens for c in counts) > 0
    assert sum(c.num_draft_tokens - c.num_accepted_tokens for c in counts) > 0


CHUNKED_OR_CACHED = [
    (method, *options)
    for method in METHODS
    for options in (((1, True, True), (5, False, False)) if method in GROUP else ((3, True, False), (3, False, True)))
]
"""(method, k, cache, chunked): every method with and without a cache, and with and without chunks."""


@pytest.mark.parametrize(("method", "k", "cache", "chunked"), CHUNKED_OR_CACHED)
def test_text_is_byte_equal_with_adapters(models, make_engine, same_text, method, k, cache, chunked):
    """One batch of base requests, an adapter without draft weights, and two with; then from the prefix cache."""
    drafted = make_engine(
        speculative_config=models.speculative(method, k),
        enable_prefix_caching=cache,
        max_num_batched_tokens=27 if chunked else None,
        max_num_seqs=18,
        **LORA,
    )
    same_text(drafted, ["greedy", "filtered", "penalised"], True)
    hits = drafted.stats().prefix_cache_hits
    same_text(drafted, ["restricted"], True)  # the same prompts; of so few tokens that n-grams match
    assert (drafted.stats().prefix_cache_hits > hits) == cache
    counts = {entry.adapter: entry.counts for entry in drafted.stats().speculation}
    assert {name for name, c in counts.items() if c.num_draft_tokens > 0} == {"", "a", "b", "c"}
    assert sum(c.num_accepted_tokens for c in counts.values()) > 0
    rejected = sum(c.num_draft_tokens - c.num_accepted_tokens for c in counts.values())
    assert (rejected == 0) == ((method, k) == ("uno", 1))  # its first draft is the target's own token
    loaded = {info.name: info.draft for info in drafted.adapters.list()}
    expected = "loaded" if method in MODEL_METHODS else ""
    assert loaded == {"a": expected, "b": expected, "c": ""}


SMALL_BLOCKS = {"block_size": 4, "max_num_seqs": 3}
PREEMPTED = {"max_model_len": 112, "block_size": 8, "num_gpu_blocks_override": 17}


@pytest.mark.parametrize(
    ("method", "options"),
    [*((method, PREEMPTED) for method in METHODS), *((method, SMALL_BLOCKS) for method in GROUP)],
)
def test_scheduling_and_speculation_together(models, make_engine, same_text, method, options):
    drafted = make_engine(speculative_config=models.speculative(method, 4), **LORA, **options)
    for again in (False, True):
        hits = drafted.stats().prefix_cache_hits
        same_text(drafted, ["greedy", "penalised"], True)
        assert drafted.stats().prefix_cache_hits > hits or not again, "the second time from the prefix cache"
    assert (drafted.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in options)


@pytest.fixture(scope="module")
def scored(plain_engine, run, prompts):
    """Jobs that want log-probabilities, and their outcomes without speculation."""
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=16, logprobs=3, prompt_logprobs=1)
    jobs = [(prompt, params) for prompt in prompts]
    return jobs, run(plain_engine, jobs)


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_do_not_depend_on_speculation(models, make_engine, run, scored, method):
    jobs, want = scored
    got = run(make_engine(speculative_config=models.speculative(method, 3)), jobs)
    for one, other in zip(got, want, strict=True):
        assert [e.token_ids for e in one.logprobs] == [e.token_ids for e in other.logprobs]
        assert [e.rank for e in one.logprobs] == [e.rank for e in other.logprobs]
        ours, theirs = one.logprobs + one.prompt_logprobs[1:], other.logprobs + other.prompt_logprobs[1:]
        for entry, want_entry in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                torch.tensor(entry.logprobs), torch.tensor(want_entry.logprobs), rtol=0, atol=1e-4
            )


def test_a_request_can_switch_speculation_off_or_cap_it(models, make_engine, run, prompts):
    engine = make_engine(speculative_config=models.speculative("draft_model", 4))
    params = PARAMS["greedy"]
    wants = (None, False, 2)
    outcomes = run(engine, [(prompts[0], params.clone(speculative=w)) for w in wants])
    assert len({tuple(o.token_ids) for o in outcomes}) == 1
    assert outcomes[1].speculation is None
    assert max(len(d) for d in outcomes[1].deltas) == 1
    assert len(outcomes[0].speculation.accepted_per_pos) == 4
    assert len(outcomes[2].speculation.accepted_per_pos) == 2


@pytest.mark.parametrize("method", [method for method in METHODS if method in MODEL_METHODS])
def test_drafters_know_masks_and_penalties(models, make_engine, run, prompts, method):
    """Else nearly all drafts of a constrained request would be wrong."""
    engine = make_engine(speculative_config=models.speculative(method, 4))
    allowed = [*range(20, 60)]
    masked = SamplingParams(temperature=0, allowed_token_ids=allowed, max_tokens=24)
    new = SamplingParams(temperature=0, repetition_penalty=100.0, max_tokens=24, ignore_eos=True)  # no token twice
    for params, right in (
        (masked, lambda request, drafts: set(drafts) <= set(allowed)),
        (new, lambda request, drafts: len({*request.tokens, *drafts}) == len({*request.tokens}) + len(drafts)),
    ):
        seen = 0
        for number, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(str(number), prompt, params))
        while engine.has_work():
            engine.step()
            for request in engine.scheduler.running:
                assert right(request, request.drafts.token_ids)
                seen += len(request.drafts.token_ids)
        assert seen > 0


@pytest.mark.parametrize("method", ["draft_model", "dflash", "dspark", "uno"])
def test_drafter_catches_up_after_steps_without_drafts(models, make_engine, run, prompts, method):
    """A prompt computed with speculation off is found in the prefix cache by a request that has it on."""
    engine = make_engine(speculative_config=models.speculative(method, 4))
    params = PARAMS["greedy"]
    (alone,) = run(engine, [(prompts[3], params)])
    fresh = make_engine(speculative_config=models.speculative(method, 4))
    run(fresh, [(prompts[3], params.clone(speculative=False))])
    (after,) = run(fresh, [(prompts[3], params)])
    assert after.num_cached_tokens > 0
    assert after.token_ids == alone.token_ids
    assert after.speculation == alone.speculation


PROMPT = [5, 6, 7, 8] * 4


@pytest.fixture(scope="module")
def third_token(models):
    """See `exact_third_token`."""
    return exact_third_token(models.reference())


def exact_third_token(reference):
    """The target's exact distribution of the third token after PROMPT with top_k=4, summed over paths."""

    def distribution(ids):
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, -1].double()
        top = logits.topk(4)
        return dict(zip(top.indices.tolist(), (top.values / 1.5).softmax(-1).tolist(), strict=True))

    exact = Counter()
    for first, p in distribution(PROMPT).items():
        for second, q in distribution([*PROMPT, first]).items():
            for third, r in distribution([*PROMPT, first, second]).items():
                exact[third] += p * q * r
    return exact


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        *((method, "standard") for method in ("ngram", "draft_model", "eagle3", "medusa", "dflash", "dspark", "uno")),
        *((method, "invariant") for method in ("ngram", "draft_model")),
    ],
)
def test_unseeded_frequencies_are_the_targets(models, make_engine, run, third_token, method, rule):
    """Suffix drafts are as certain as n-grams, EAGLE's are drawn as EAGLE-3's; the invariant rule does not ask how
    drafts were drawn.

    Chi-square over the third token of 1,000 samples. There are 16 paths to it; cells under 5 expected are pooled. The
    bound is the 99.99% quantile."""
    speculative = models.speculative(method, 3) | {"rejection_sample_method": rule}
    check_frequencies(make_engine(speculative_config=speculative, max_num_seqs=200), run, third_token)


def check_frequencies(engine, run, exact, count=1000):
    from scipy.stats import chi2

    params = SamplingParams(temperature=1.5, top_k=4, max_tokens=5, ignore_eos=True)
    seen = Counter()
    for _ in range(count // 200):
        seen.update(o.token_ids[2] for o in run(engine, [(PROMPT, params)] * 200))
    assert set(seen) <= set(exact)
    large = [t for t, p in exact.items() if p * count >= 5]
    cells = [(seen[t], exact[t] * count) for t in large]
    rest = (count - sum(s for s, _ in cells), count - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    assert statistic < chi2.ppf(0.9999, len(cells) - 1)
    assert sum(entry.counts.num_accepted_tokens for entry in engine.stats().speculation) > 0


@pytest.fixture(scope="module")
def padded(models, tmp_path_factory):
    """padded(size) -> folders of the target and of the draft model with that many embedding rows, which share a
    tokenizer. Rows beyond the target's would win if they could."""

    def make(size):
        target, draft = (tmp_path_factory.mktemp("padded") / name for name in ("target", "draft"))
        shutil.copytree(models.target, target)
        shutil.copytree(models.draft, draft)
        for folder in (target, draft):
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 5, "b": 6}}}))
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        tensors = load_file(draft / "model.safetensors")
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat((rows, 5.0 * rows[: max(0, size - len(rows))]))[:size].clone()
        save_file(tensors, draft / "model.safetensors")
        return str(target), str(draft)

    return make


@pytest.mark.parametrize("size", [140, 176])
def test_a_draft_model_may_have_more_embedding_rows_or_fewer(make_engine, run, same_text, padded, third_token, size):
    """Prompts have tokens that the smaller one lacks; the text is as without, and frequencies are the target's."""
    target, draft = padded(size)
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    engine = make_engine(model=target, speculative_config=speculative, max_num_seqs=200)
    same_text(engine, PARAMS, False)
    check_frequencies(engine, run, third_token)


def test_a_draft_model_may_have_another_tokenizer(models, make_engine, run, same_text, third_token, tmp_path):
    """It has the tokens in reverse order, lacks some of those in the prompts, and has others that would win."""
    target, draft = (
        shutil.copytree(models.target, tmp_path / "target"),
        shutil.copytree(models.draft, tmp_path / "draft"),
    )
    tensors, config = load_file(draft / "model.safetensors"), json.loads((draft / "config.json").read_text())
    size = config["vocab_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat((5.0 * tensors[name][:10], tensors[name][: size - 20].flip(0))).contiguous()
    save_file(tensors, draft / "model.safetensors")
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": size - 10}))
    theirs = {f"own{i}" if i < 10 else f"▁t{size - 11 - i}": i for i in range(size - 10)}
    for folder, vocabulary in ((target, {f"Ġt{i}": i for i in range(size)}), (draft, theirs)):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    engine = make_engine(model=str(target), speculative_config=speculative, max_num_seqs=200)
    same_text(engine, PARAMS, False)
    check_frequencies(engine, run, third_token)
