"""Adapters that bring weights for the draft model: the text stays, acceptance rises, and both parts live as one."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LoRARequest, SamplingParams
from outrider.lora.device.sites import AdapterHooks
from outrider.lora.manager import AdapterManager
from outrider.models.batch import SequenceRows, allocate_kv, build_batch
from outrider.models.checkpoint.loader import load_model
from outrider.platform.core.config import LoRAConfig
from outrider.platform.core.errors import AdapterError
from outrider.platform.core.messages import EngineRequest
from outrider.platform.core.request import Request

from .test_async_speculation import note_drafts

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def bare(models, tmp_path_factory):
    """Folders by name: the tiny models' adapters without the draft weights that some of them have."""
    root = tmp_path_factory.mktemp("bare")
    for name, path in models.adapters.items():
        shutil.copytree(path, root / name, ignore=shutil.ignore_patterns("draft"))
    return {name: str(root / name) for name in models.adapters}


@pytest.fixture(scope="module")
def drafted(bare, tmp_path_factory):
    """The same, each with draft weights.

    The draft model is the target with noise, so what an adapter does to the one is right for the other.
    """
    root, folders = tmp_path_factory.mktemp("drafted"), {}
    for name, path in bare.items():
        folders[name] = root / name
        shutil.copytree(path, folders[name])
        shutil.copytree(path, folders[name] / "draft")
    return folders


@pytest.fixture
def start_engine(models, make_engine):
    def make(method="draft_model", k=3, **options):
        return make_engine(**LORA | options, speculative_config=models.speculative(method, k))

    return make


def change(folder: Path, edit) -> None:
    """Edit the tensors of an adapter's folder."""
    save_file(edit(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def rounds(outcomes):
    """(accepted drafts a verification, verifications) of some requests."""
    counts = [outcome.speculation for outcome in outcomes if outcome.speculation is not None]
    verifications = sum(c.num_verifications for c in counts)
    return sum(c.num_accepted_tokens for c in counts) / verifications, verifications


def lora_request(name, folder):
    return LoRARequest(name, path=str(folder))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "seed": 5}], ids=["greedy", "seeded"])
def test_same_text_and_more_drafts_accepted(bare, start_engine, plain_engine, run, prompts, drafted, params, k):
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, **params)

    def jobs(folders):
        names = [None, "a", "b", "c"] * len(prompts)
        prompt = [prompts[i // 4] for i in range(len(names))]
        return [(p, sampling, lora_request(n, folders[n]) if n else None) for p, n in zip(prompt, names, strict=True)]

    texts, accepted = {}, {}
    for kind, folders in {"with": drafted, "without": bare}.items():
        outcomes = run(start_engine(k=k), jobs(folders))
        texts[kind] = [o.token_ids for o in outcomes]
        accepted[kind] = {name: rounds(outcomes[i::4])[0] for i, name in enumerate(("", "a", "b", "c"))}
    plain = [o.token_ids for o in run(plain_engine, jobs(bare))]
    assert texts["with"] == texts["without"] == plain
    for name in "abc":
        assert accepted["with"][name] > accepted["without"][name] + 0.15, name
    assert accepted["with"][""] == accepted["without"][""]


def test_some_adapters_with_and_some_without(bare, start_engine, plain_engine, run, prompts, greedy, drafted):
    """In one batch each request is drafted for by its own weights, or by the plain draft model."""
    engine = start_engine()
    folders = {"a": drafted["a"], "b": bare["b"], "c": drafted["c"]}
    jobs = [(p, greedy, lora_request(n, folders[n])) for p in prompts for n in folders]
    mixed = run(engine, jobs)
    assert [o.token_ids for o in mixed] == [o.token_ids for o in run(plain_engine, jobs)]
    for index, (name, folder) in enumerate(folders.items()):
        alone = run(start_engine(), [(p, greedy, lora_request(name, folder)) for p in prompts])
        assert rounds(mixed[index::3]) == rounds(alone), name
    assert {info.name: info.draft for info in engine.adapters.list()} == {"a": "loaded", "b": "", "c": "loaded"}


def test_a_draft_pass_equals_peft_on_the_draft_model(models, drafted, bare):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    target, draft = (load_model(path, dtype="float32") for path in (models.target, models.draft))
    hooks = AdapterHooks(target.embedding, "draft_model", draft.linears())
    config = LoRAConfig(max_loras=3, max_cpu_loras=3, max_lora_rank=8)
    manager = AdapterManager(target.linears(), config, torch.float32, "cpu", hooks)
    requests, lengths = [], [9, 70, 4, 33, 1]
    for index, folder in enumerate((None, drafted["a"], bare["b"], drafted["c"], drafted["a"])):
        lora = lora_request(f"{folder}", folder) if folder else None
        requests.append(Request(str(index), [3], 1, SamplingParams(), seed_key=0, lora=lora, order=(0, index)))
        manager.resolve(requests[-1])
        while manager.admit(requests[-1]) is not None:
            manager.wait(10)
    generator = torch.Generator().manual_seed(3)
    chunks = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in lengths]
    kv = allocate_kv(draft.kv_layers, 50, 8, torch.float32)
    tables = [list(range(10 * i, 10 * i + 9)) for i in range(5)]
    rows = SequenceRows([t for chunk in chunks for t in chunk], lengths, [0] * 5, tables)
    batch = build_batch(
        rows, draft, kv, manager.prepare_draft([(r.adapter, n) for r, n in zip(requests, lengths, strict=True)])
    )
    got = draft.compute_logits(draft.forward(batch).hidden).split(lengths)
    for index, name in enumerate([None, "a", None, "c", "a"]):
        model = AutoModelForCausalLM.from_pretrained(models.draft, dtype=torch.float32)
        if name is not None:
            model = PeftModel.from_pretrained(model, drafted[name] / "draft")
        with torch.inference_mode():
            expected = model.eval()(torch.tensor([chunks[index]])).logits[0]
        torch.testing.assert_close(got[index], expected, atol=1e-4, rtol=0)
    assert manager.prepare_draft([(requests[0].adapter, 3), (requests[2].adapter, 2)]) is None  # costs nothing
    for request in requests:
        manager.forget(request)
    manager.close()


def test_only_the_draft_weights_changed_is_a_new_version(start_engine, run, prompts, greedy, drafted, tmp_path):
    """Draft KV lies in the shared blocks, so new draft weights must not find the old ones' blocks."""
    folder = tmp_path / "x"
    shutil.copytree(drafted["a"], folder)
    engine = start_engine()
    old = engine.adapters.load(lora_request("x", folder))
    (first,) = run(engine, [(prompts[1], greedy, lora_request("x", folder))])
    change(folder / "draft", lambda tensors: {k: -v if "lora_B" in k else v for k, v in tensors.items()})
    new = engine.adapters.load(lora_request("x", folder), load_inplace=True)
    assert new.digest != old.digest
    (second,) = run(engine, [(prompts[1], greedy, lora_request("x", folder))])
    assert second.token_ids == first.token_ids
    assert second.num_cached_tokens == 0
    assert rounds([second])[0] < rounds([first])[0]  # they draft for another text
    # Without a drafter that reads them, they are no part of the content.
    plain = start_engine("ngram")
    digest = plain.adapters.load(lora_request("x", folder)).digest
    change(folder / "draft", lambda tensors: {key: 2 * value for key, value in tensors.items()})
    assert plain.adapters.load(lora_request("x", folder), load_inplace=True).digest == digest


def test_eviction_and_reload_bring_the_draft_weights_back(start_engine, run, prompts, greedy, drafted):
    crowded, roomy = start_engine(max_loras=1, max_cpu_loras=1), start_engine()
    for name in "abcabc":
        jobs = [(prompts[2], greedy, lora_request(name, drafted[name]))]
        assert rounds(run(crowded, jobs)) == rounds(run(roomy, jobs))
    assert sorted(info.level for info in crowded.adapters.list()) == ["device", "disk", "disk"]


def test_rows_hold_the_larger_of_both_ranks(start_engine, drafted, bare, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(bare["a"], folder)  # rank 4
    shutil.copytree(bare["b"], folder / "draft")  # rank 8
    assert start_engine().adapters.load(lora_request("x", folder)).rows == 8
    assert start_engine("ngram").adapters.load(lora_request("x", folder)).rows == 4


def _config(**values):
    def edit(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


BROKEN = {
    "another module": (
        lambda folder: change(folder, lambda t: {key.replace("q_proj", "x_proj"): v for key, v in t.items()}),
        "x_proj",
    ),
    "another shape": (lambda folder: change(folder, lambda t: {k: v[:, :-1].clone() for k, v in t.items()}), "shape"),
    "rank above the limit": (_config(r=9), "rank 9 exceeds"),
    "corrupt": (lambda folder: (folder / WEIGHTS).write_bytes(b"nothing"), "safetensors"),
    "not finite": (lambda folder: change(folder, lambda t: {k: v * float("inf") for k, v in t.items()}), "finite"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "DoRA without magnitudes": (_config(use_dora=True), "lora_magnitude_vector is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_draft_weights(start_engine, plain_engine, bare, run, prompts, greedy, drafted, tmp_path, caplog, case):
    """The folder's own ones: the adapter is served without. Named ones: it is refused."""
    damage, reason = BROKEN[case]
    folder = tmp_path / "x"
    shutil.copytree(drafted["a"], folder)
    damage(folder / "draft")
    engine = start_engine(max_loras=1, max_cpu_loras=1)
    with caplog.at_level(logging.WARNING):
        info = engine.adapters.load(lora_request("x", folder))
        for name, path in (("x", folder), ("b", drafted["b"]), ("x", folder)):  # read again
            (outcome,) = run(engine, [(prompts[1], greedy, lora_request(name, path))])
    assert reason in info.draft
    assert engine.adapters.list()[0].draft == info.draft
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    (expected,) = run(plain_engine, [(prompts[1], greedy, lora_request("a", bare["a"]))])
    assert outcome.token_ids == expected.token_ids
    with pytest.raises(AdapterError, match="draft_path") as error:
        engine.adapters.load(LoRARequest("y", path=bare["a"], draft_path=str(folder / "draft")))
    assert error.value.param == "draft_path"
    assert [info.name for info in engine.adapters.list()] == ["x", "b"]


def test_draft_path(start_engine, bare, run, prompts, greedy, drafted):
    """Draft weights from elsewhere; a request that names none means those registered, one that does names others."""
    engine, own = start_engine(), start_engine()
    named = LoRARequest("a", path=bare["a"], draft_path=str(drafted["a"] / "draft"))
    info = engine.adapters.load(named)
    assert info.draft == "loaded"
    assert info.digest == own.adapters.load(lora_request("a", drafted["a"])).digest
    got = run(engine, [(prompts[2], greedy, lora_request("a", bare["a"]))])
    assert rounds(got) == rounds(run(own, [(prompts[2], greedy, lora_request("a", drafted["a"]))]))
    other = LoRARequest("a", path=bare["a"], draft_path=str(drafted["c"] / "draft"))
    run(engine, [(prompts[2], greedy, other)])
    assert engine.adapters.list()[0].digest != info.digest
    nowhere = LoRARequest("z", path=bare["a"], draft_path="/nowhere/at/all")
    with pytest.raises(AdapterError, match=r"draft_path.*nowhere") as error:
        engine.adapters.load(nowhere)
    assert error.value.param == "draft_path"
    with pytest.raises(AdapterError, match=r"draft_path.*nowhere"):
        run(engine, [(prompts[2], greedy, nowhere)])
    assert start_engine("ngram").adapters.load(nowhere).draft == ""  # nothing there would read them


def test_a_wrong_draft_path_of_one_request_does_not_affect_others(
    start_engine, run, prompts, greedy, drafted, tmp_path
):
    """Nor does one whose files turn out to be broken: the adapter stays, with its pin and its place on the device."""
    engine = start_engine()
    good = lora_request("a", drafted["a"])
    engine.adapters.load(good, pinned=True)
    run(engine, [(prompts[1], greedy, good)])
    before = engine.adapters.list()
    shutil.copytree(drafted["c"] / "draft", tmp_path / "broken")
    (tmp_path / "broken" / WEIGHTS).write_bytes(b"x")
    for wrong in ("/nowhere", "/" + "a" * 5000):
        with pytest.raises(AdapterError, match="draft_path"):
            run(engine, [(prompts[1], greedy, LoRARequest("a", path=good.path, draft_path=wrong))])
    broken = LoRARequest("a", path=good.path, draft_path=str(tmp_path / "broken"))
    failed, served = run(engine, [(prompts[1], greedy, broken), (prompts[2], greedy, good)])
    assert (failed.error.type, failed.error.param) == ("InvalidAdapter", "draft_path")
    assert served.finish_reason == "length"
    assert engine.adapters.list() == before
    assert (before[0].pinned, before[0].level, before[0].draft) == (True, "device", "loaded")


def test_every_run_of_an_engine_has_its_own_id(start_engine):
    one, other = start_engine("ngram"), start_engine("ngram")
    assert one.stats().run_id == one.stats().run_id != other.stats().run_id != ""


def test_a_folder_for_each_method(start_engine, bare, drafted, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(bare["a"], folder)
    for method in ("eagle3", "draft_model"):
        shutil.copytree(drafted["a"] / "draft", folder / "draft" / method)
    change(folder / "draft" / "eagle3", lambda t: {"base_model.model.fc.lora_A.weight": torch.ones(4, 2)})
    assert start_engine().adapters.load(lora_request("x", folder)).draft == "loaded"
    shutil.rmtree(folder / "draft" / "draft_model")
    assert (
        start_engine().adapters.load(lora_request("x", folder)).draft == ""
    )  # for another drafter only: nothing is wrong


def test_drafter_forgets_unreferenced_adapter_content(start_engine, models, prompts, greedy, monkeypatch, tmp_path):
    from outrider.spec_decode.drafters.ngram import NgramDrafter

    forgotten = []
    monkeypatch.setattr(NgramDrafter, "forget_adapter", lambda self, digest: forgotten.append(digest))
    engine = start_engine("ngram")
    digest = bytes.fromhex(engine.adapters.load(models.lora("a")).digest)
    engine.adapters.load(LoRARequest("twin", path=models.adapters["a"]))
    engine.add_request(EngineRequest("r", list(prompts[1]), greedy, [1], lora=models.lora("a")))
    engine.step()
    engine.adapters.unload("twin")
    engine.adapters.unload("a")
    assert forgotten == []  # a request still runs with it
    while engine.has_work():
        engine.step()
    assert forgotten == [digest]


@pytest.mark.parametrize("name", ["json", "sql", "support"])
def test_demo_draft_weights_raise_acceptance(name, make_engine, run, tmp_path):
    from outrider.models.demo import demo_adapters, demo_model_path
    from outrider.tools.demo_model.evaluation import held_out
    from outrider.tools.demo_model.mixture import adapter_document

    base = Path(demo_model_path())
    draft = base.parent / "draft"
    plain = tmp_path / "without"
    shutil.copytree(demo_adapters()[name], plain, ignore=shutil.ignore_patterns("draft"))
    questions = held_out(base, lambda rng: adapter_document(rng, name), 20, seed=99)
    params = SamplingParams(temperature=0, max_tokens=80, stop_token_ids=[2])
    lengths, texts = {}, {}
    for kind, folder in {"with": demo_adapters()[name], "without": plain}.items():
        engine = make_engine(
            model=str(base),
            max_model_len=512,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=16,
            speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4},
        )
        jobs = [(question.prompt, params, LoRARequest(name, path=str(folder))) for question in questions]
        outcomes = run(engine, jobs)
        texts[kind] = [outcome.token_ids for outcome in outcomes]
        lengths[kind] = 1 + rounds(outcomes)[0]
    assert texts["with"] == texts["without"]
    assert lengths["with"] > lengths["without"] + 0.3, lengths


@pytest.fixture
def eagle3_heads(models, tmp_path):
    """Folders of an EAGLE-3 head for the tiny target, and of the same with a LoRA for all its projections merged into
    it; that LoRA's tensors by the head's canonical names, to be scaled by 1.5."""
    generator = torch.Generator().manual_seed(4)
    head, merged, lora = models.head("eagle3"), tmp_path / "merged", {}
    shutil.copytree(head, merged)
    tensors = load_file(head / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("_proj.weight", "fc.weight")):
            a, b = (0.2 * torch.randn(shape, generator=generator) for shape in ((2, weight.shape[1]), (len(weight), 2)))
            key = f"base_model.model.{name.replace('midlayer', 'layers.0').removesuffix('weight')}"
            lora |= {f"{key}lora_A.weight": a, f"{key}lora_B.weight": b}
            tensors[name] = weight.float() + 1.5 * b @ a
    save_file(tensors, merged / "model.safetensors")
    assert len(lora) == 2 * 8
    return head, merged, lora


def test_draft_weights_for_an_eagle3_head(
    models, make_engine, plain_engine, run, prompts, greedy, drafted, eagle3_heads, tmp_path, bare
):
    """The drafts are the merged head's. Draft weights for a draft model, in the same place, do not fit the head."""
    head, merged, lora = eagle3_heads
    folder = tmp_path / "x"
    shutil.copytree(bare["a"], folder)
    nested = folder / "draft" / "eagle3"
    nested.mkdir(parents=True)
    save_file(lora, nested / WEIGHTS)
    (nested / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 3}))

    def jobs(requests):  # greedy: the seeds only distinguish the requests' drafts
        return [(p, greedy.clone(seed=seed), request) for p in prompts for seed, request in enumerate(requests)]

    def drafts(path, *requests):
        """The engine, the drafts and the texts."""
        config = {"method": "eagle3", "model": str(path), "num_speculative_tokens": 3}
        engine = make_engine(**LORA, speculative_config=config)
        found = note_drafts(engine)
        return engine, found, [o.token_ids for o in run(engine, jobs(requests))]

    engine, adapted, texts = drafts(head, lora_request("x", folder), lora_request("unfit", drafted["b"]), None)
    x, unfit = engine.adapters.list()
    assert x.draft == "loaded"
    assert "no linear module" in unfit.draft
    _, without, _ = drafts(head, lora_request("x", bare["a"]), lora_request("unfit", bare["b"]), None)
    _, of_x, _ = drafts(merged, lora_request("x", bare["a"]))
    seeds = {seed for seed, _ in of_x}
    assert adapted == of_x | {key: ids for key, ids in without.items() if key[0] not in seeds}
    assert adapted != without
    expected = run(plain_engine, jobs([models.lora("a"), models.lora("b"), None]))
    assert texts == [o.token_ids for o in expected]
