"""Isolation: answers to one tenant are in no other's drafts or cached blocks; for its own requests they are."""

from __future__ import annotations

import json

import pytest

from outrider import LoRARequest, SamplingParams

VOCAB = 160
RANDOM = SamplingParams(temperature=8.0, seed=11, max_tokens=90, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def four_grams(tokens):
    return {tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)}


class Recorder:
    """Wrapper of an engine's drafter that records the drafts by tenant, with the tokens before them."""

    def __init__(self, engine):
        self.seen = []
        proposer = engine._runner._drafter
        propose = proposer.propose

        def recording(rows, target):
            proposals = propose(rows, target)
            for row, proposal in zip(rows, proposals, strict=True):
                if proposal.drafts.token_ids:
                    self.seen.append((row.request.request_id, list(row.tokens), proposal.drafts.token_ids))
            return proposals

        proposer.propose = recording

    def leaks(self, secret):
        """The four-grams of `secret` that drafts, after the last tokens, have spelled out."""
        found = set()
        for _, tokens, drafts in self.seen:
            found |= four_grams(tokens[-3:] + drafts) & four_grams(secret)
        return found


def speculative(method, k=5):
    config = {"method": method, "num_speculative_tokens": k}
    if method == "suffix":  # as eager as it can be
        return config | {"suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.0}
    return config | {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


def probes(secret):
    """Prompts that end with three tokens of the secret: a cache hit would add the fourth. None has all four."""
    start = [*secret[:3], 3, 4, *secret[20:23], 5, 3]
    return [[*start, *secret[i : i + 3]] for i in range(4, 60, 4)]


def teach(run, engine, lora=None, **fields):
    """The secret: a long random text that one tenant is given, several times."""
    outcomes = run(engine, [([7, 8, 9], RANDOM, lora, fields)] * 3)
    secret = outcomes[0].token_ids
    assert len(secret) == 90
    assert all(o.token_ids == secret for o in outcomes)
    assert len(four_grams(secret)) > 80
    return secret


def probe(run, engine, secret, lora=None, **fields):
    """Ask with the probes; what the drafts gave away."""
    recorder = Recorder(engine)
    run(engine, [(prompt, GREEDY, lora, fields) for prompt in probes(secret)])
    return recorder.leaks(secret)


WHO = {
    "tenant": ({"tenant": "a"}, {"tenant": "b"}),
    "no-tenant": ({"tenant": "a"}, {}),
    "salt": ({"tenant": "a", "cache_salt": "x"}, {"tenant": "a", "cache_salt": "y"}),
    "no-salt": ({"cache_salt": "x"}, {}),
    "joined": ({"tenant": "ab", "cache_salt": "c"}, {"tenant": "a", "cache_salt": "bc"}),
}


@pytest.mark.parametrize("who", WHO)
def test_suffix_drafts_stay_with_their_tenant(make_engine, run, who):
    engine = make_engine(speculative_config=speculative("suffix"))
    mine, other = WHO[who]
    secret = teach(run, engine, **mine)
    assert probe(run, engine, secret, **other) == set()
    assert len(probe(run, engine, secret, **mine)) > 20  # the same probes by whom it belongs to


def test_a_running_request_of_another_tenant_is_not_drafted_from(make_engine, run):
    """Both run in the same batch."""
    engine = make_engine(speculative_config=speculative("suffix"))
    secret = teach(run, engine, tenant="a")
    recorder = Recorder(engine)
    jobs = [([7, 8, 9], RANDOM, None, {"tenant": "a"})] + [(p, GREEDY, None, {"tenant": "b"}) for p in probes(secret)]
    outcomes = run(engine, jobs)
    assert outcomes[0].token_ids == secret
    everything = recorder.seen
    recorder.seen = [entry for entry in everything if entry[1][:3] == [7, 8, 9]]
    assert len(recorder.leaks(secret)) > 20
    recorder.seen = [entry for entry in everything if entry[1][:3] != [7, 8, 9]]
    assert recorder.leaks(secret) == set()


@pytest.mark.parametrize("who", WHO)
def test_ngram_drafts_come_from_the_request_alone(make_engine, run, who):
    engine = make_engine(speculative_config=speculative("ngram"))
    for fields in WHO[who]:
        secret = teach(run, engine, **fields)
    for fields in WHO[who]:
        assert probe(run, engine, secret, **fields) == set()
    recorder = Recorder(engine)
    run(engine, [([*secret, *secret[10:13]], GREEDY)])  # by its own prompt it is drafted
    assert recorder.leaks(secret)


def test_a_corpus_is_drafted_for_its_tenant_alone(make_engine, run, tmp_path):
    secret = teach(run, make_engine())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "secret.jsonl").write_text(json.dumps({"token_ids": secret}) + "\n")
    (tmp_path / "all.jsonl").write_text(json.dumps({"token_ids": [1, 2, 3]}) + "\n")
    config = speculative("ngram") | {"prompt_lookup_corpus": str(tmp_path)}
    engine = make_engine(speculative_config=config)
    for other in ({"tenant": "b"}, {}, {"tenant": "../a"}, {"cache_salt": "a"}):
        assert probe(run, engine, secret, **other) == set()
    assert len(probe(run, engine, secret, tenant="a")) > 20


@pytest.mark.parametrize("other", [None, "b"])
def test_suffix_drafts_stay_with_their_adapter(models, make_engine, run, other):
    engine = make_engine(speculative_config=speculative("suffix"), **LORA)
    secret = teach(run, engine, models.lora("a"))
    assert probe(run, engine, secret, models.lora(other)) == set()
    assert len(probe(run, engine, secret, models.lora("a"))) > 20


def test_suffix_stores_are_keyed_by_adapter_content(models, make_engine, run):
    engine = make_engine(speculative_config=speculative("suffix"), **LORA)
    engine.adapters.load(LoRARequest("x", path=models.adapters["a"]))
    x = LoRARequest("x", path=models.adapters["a"])
    secret = teach(run, engine, x)
    same = LoRARequest("y", path=models.adapters["a"])  # the same content under another name
    engine.adapters.load(same)
    assert len(probe(run, engine, secret, same)) > 20
    new = LoRARequest("x", path=models.adapters["b"])  # other content under the same name
    engine.adapters.load(new, load_inplace=True)
    assert probe(run, engine, secret, new) == set()


def test_unloading_an_adapter_drops_its_suffix_store(models, make_engine, run):
    engine = make_engine(speculative_config=speculative("suffix"), **LORA)
    base = teach(run, engine)
    a = models.lora("a")
    engine.adapters.load(a)
    secret = teach(run, engine, a)
    run(engine, [([5], GREEDY, models.lora("b"))])  # a step, so that the last ones are taken in
    stores = engine._runner._drafter.stores
    assert {namespace[1] for namespace in stores._trees} > {b""}
    before = stores.num_nodes
    engine.adapters.unload("a")
    assert stores.num_nodes < before
    engine.adapters.load(a)
    assert probe(run, engine, secret, a) == set()
    assert len(probe(run, engine, base)) > 20  # the base model's is still there


def test_stores_are_bounded_in_the_engine(make_engine, run):
    config = speculative("suffix") | {"suffix_decoding_max_cached_requests": 2}
    engine = make_engine(speculative_config=config)
    stores = engine._runner._drafter.stores
    sizes = []
    for i in range(8):
        params = SamplingParams(temperature=8.0, seed=i, max_tokens=60, ignore_eos=True)
        run(engine, [([7, 8, 9], params, None, {"tenant": str(i % 3)})])
        sizes.append((len(stores), stores.num_tokens, stores.num_nodes))
    assert max(s[0] for s in sizes) == 2
    assert max(s[1] for s in sizes) <= 120
    assert max(s[2] for s in sizes) <= 240


def test_tenants_and_salts_share_no_blocks(make_engine, run, prompts, greedy):
    engine = make_engine()
    fields = [{}, {"tenant": "t"}, {"cache_salt": "t"}, {"tenant": "t", "cache_salt": "u"}, {"tenant": "t"}]
    outcomes = [run(engine, [(prompts[3], greedy, None, f)])[0] for f in fields]
    assert [o.num_cached_tokens for o in outcomes] == [0, 0, 0, 0, 48]
