"""Probabilities of labels against transformers' and PEFT's sequence classification, in batches and in chunks."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import shutil

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, AsyncLLM, InvalidRequestError, LoRARequest, SamplingParams
from outrider.models.demo import demo_model_path
from outrider.outputs import ClassificationRequestOutput
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import AdapterError, UnsupportedModelError
from outrider.platform.http.app import create_app
from outrider.platform.http.batch import BatchFiles, run_batch
from outrider.platform.http.server_config import ServerConfig

from ..thread_ranks import ranks_as_threads

SCORE = "base_model.model.score.weight"
TEXTS = ["SELECT name FROM users", "How do I reset my password?", "a", "the same words again and again " * 12]
OPTIONS = {
    **{"tokenizer": str(demo_model_path()), "dtype": "float32", "enable_lora": True, "max_lora_rank": 4},
    **{"speculative_config": None, "max_num_batched_tokens": 48, "max_model_len": 256},
}
LABELS = {"id2label": {0: "praise", 1: "question", 2: "order"}}
CASES = {
    "llama-softmax": ("Llama", LABELS, lambda scores: scores.softmax(-1)),
    "qwen2-one-label": ("Qwen2", {"num_labels": 1}, torch.sigmoid),
    "qwen3-default": ("Qwen3", {}, lambda scores: scores.softmax(-1)),
    "gemma2-sigmoid": ("Gemma2", {"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
    "mistral-regression": ("Mistral", {"num_labels": 1, "problem_type": "regression"}, lambda scores: scores),
}


NUM_LABELS = dict(zip(CASES, (3, 1, 2, 3, 1), strict=True))


class Classifier:
    """Folders of a tiny classifier and of two adapters on its projections, of which `scored` has a score matrix of its
    own; probabilities as transformers gives them."""

    def __init__(self, root, family, labels, activation) -> None:
        import transformers
        from peft import LoraConfig, get_peft_model

        self.folder, self.adapter, self._activation = str(root / "model"), str(root / "adapter"), activation
        self.scored = str(root / "scored")
        vocab = json.loads((demo_model_path() / "config.json").read_text())["vocab_size"]
        sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 12, "vocab_size": vocab, "max_position_embeddings": 256}
        config = getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.2, pad_token_id=None, **labels)
        torch.manual_seed(0)
        base = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
        base.save_pretrained(self.folder)
        task = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS", init_lora_weights=False)
        self._scored = get_peft_model(copy.deepcopy(base), task).eval()
        self._scored.get_parameter("base_model.model.score.modules_to_save.default.weight").data.normal_()
        self._scored.save_pretrained(self.scored)
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["score"])
        lora.init_lora_weights = False
        self._tuned = get_peft_model(base, lora).eval()
        self._tuned.save_pretrained(self.adapter)
        file = root / "adapter" / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "SEQ_CLS"}))

    @torch.inference_mode()
    def probs(self, token_ids, name):
        """Probabilities of the base, or of the adapter "tuned" or "scored"."""
        ids = torch.tensor([token_ids])
        if name is not None:
            return self._activation({"tuned": self._tuned, "scored": self._scored}[name](ids).logits[0])
        with self._tuned.disable_adapter():
            return self._activation(self._tuned(ids).logits[0])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return Classifier(tmp_path_factory.mktemp("classifier"), *CASES["llama-softmax"])


@pytest.fixture(scope="module")
def llm(classifier):
    with LLM(classifier.folder, runner="pooling", **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("case", CASES)
def test_probabilities_equal_transformers_and_peft(case, tmp_path):
    model = Classifier(tmp_path, *CASES[case])
    adapters = [None, LoRARequest("tuned", 1, model.adapter), LoRARequest("scored", 2, model.scored)]
    prompts, loras = [text for text in TEXTS for _ in adapters], adapters * len(TEXTS)
    with LLM(model.folder, **OPTIONS) as llm:
        outputs = llm.classify(prompts, lora_request=loras, use_tqdm=False)
        again = llm.classify(prompts, lora_request=loras, use_tqdm=False)  # from the prefix cache
    assert len(outputs[-1].prompt_token_ids) > 48, "more than a chunk"
    assert again[-1].num_cached_tokens > 0
    for output, cached, used in zip(outputs, again, loras, strict=True):
        assert isinstance(output, ClassificationRequestOutput)
        want = model.probs(output.prompt_token_ids, used and used.name)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), want, rtol=1e-3, atol=1e-4)
        assert cached.outputs.probs == pytest.approx(output.outputs.probs, abs=1e-4)
    assert outputs[0].outputs.num_classes == len(outputs[0].outputs.probs) == NUM_LABELS[case]
    of_last = [output.outputs.probs for output in outputs[-3:]]
    for one, other in itertools.combinations(of_last, 2):
        assert one != pytest.approx(other, abs=1e-3), "adapters count"


def test_two_ranks_give_the_probabilities_of_one(classifier, llm, monkeypatch):
    ranks_as_threads(monkeypatch)
    adapters = [None, LoRARequest("tuned", 1, classifier.adapter), LoRARequest("scored", 2, classifier.scored)]
    want = llm.classify(TEXTS[:1] * 3, lora_request=adapters, use_tqdm=False)
    with LLM(classifier.folder, runner="pooling", tensor_parallel_size=2, **OPTIONS) as two:
        found = two.classify(TEXTS[:1] * 3, lora_request=adapters, use_tqdm=False)
    for one, other in zip(want, found, strict=True):
        # Ranks add float32 partial sums in another order; on a processor without AVX512 the difference is above 1e-6.
        assert other.outputs.probs == pytest.approx(one.outputs.probs, abs=1e-5)


def test_labels_of_the_async_engine_and_over_http_are_the_same(classifier, llm):
    async def classify():
        async with AsyncLLM(classifier.folder, async_scheduling=True, **OPTIONS) as engine:
            with pytest.raises(InvalidRequestError, match="no language-model head"):
                [output async for output in engine.generate("a", SamplingParams())]
            app = create_app(engine, ServerConfig(served_model_names=("labels",)))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
                answer = await http.post("/classify", json={"model": "labels", "input": TEXTS})
                chat = await http.post("/v1/completions", json={"prompt": "a"})
            assert (chat.status_code, chat.json()["error"]["param"]) == (400, "model")
            return await asyncio.gather(*(engine.classify(text) for text in TEXTS)), answer.json()

    want = [output.outputs.probs for output in llm.classify(TEXTS, use_tqdm=False)]
    found, answer = asyncio.run(classify())
    assert [output.outputs.probs for output in found] == [pytest.approx(probs, abs=1e-5) for probs in want]
    assert answer["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in found)
    for index, (entry, probs) in enumerate(zip(answer["data"], want, strict=True)):
        label = LABELS["id2label"][max(range(3), key=probs.__getitem__)]
        assert entry == {"index": index, "label": label, "probs": pytest.approx(probs, abs=1e-5), "num_classes": 3}


def test_labels_that_the_model_does_not_name_are_numbered(tmp_path):
    model = Classifier(tmp_path, "Llama", {}, None)
    file = tmp_path / "model" / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in values.items() if not name.endswith(("2label", "2id"))}))

    async def classify():
        async with AsyncLLM(model.folder, **OPTIONS) as engine:
            app = create_app(engine, ServerConfig(served_model_names=("labels",)))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
                return (await http.post("/classify", json={"model": "labels", "input": TEXTS})).json()["data"]

    found = [(entry["label"], max(range(2), key=entry["probs"].__getitem__)) for entry in asyncio.run(classify())]
    assert [label for label, _ in found] == [f"LABEL_{best}" for _, best in found]
    assert {best for _, best in found} == {0, 1}


def test_reloaded_score_matrices_replace_each_other(classifier, tmp_path):
    other = shutil.copytree(classifier.scored, tmp_path / "other")
    weights = load_file(other / "adapter_model.safetensors")

    def save(factor):
        save_file(weights | {SCORE: factor * weights[SCORE]}, other / "adapter_model.safetensors")

    save(-1.0)
    requests = [LoRARequest("scored", 1, classifier.scored), LoRARequest("other", 2, str(other))]
    with LLM(classifier.folder, max_loras=1, max_cpu_loras=1, **OPTIONS) as llm:
        outputs = llm.classify([TEXTS[1]] * 4, lora_request=requests * 2, use_tqdm=False)
        save(0.0)
        llm.load_lora_adapter(requests[1], load_inplace=True)
        (last,) = llm.classify([TEXTS[1]], lora_request=requests[1], use_tqdm=False)
    probs = [torch.tensor(output.outputs.probs) for output in outputs]
    torch.testing.assert_close(probs[1], (1 / probs[0]) / (1 / probs[0]).sum(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(probs[2:], probs[:2], rtol=0, atol=1e-5)
    assert last.outputs.probs == pytest.approx([1 / 3] * 3)


def test_a_file_of_requests(classifier, llm, tmp_path):
    bodies = [{"model": name, "input": TEXTS[1]} for name in ("labels", "scored")]
    lines = [{"custom_id": b["model"], "method": "POST", "url": "/classify", "body": b} for b in bodies]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    files = BatchFiles(str(tmp_path / "in"), str(tmp_path / "out"))
    config = ServerConfig(served_model_names=("labels",), lora_modules={"scored": classifier.scored})
    assert run_batch(files, EngineArgs(model=classifier.folder, **OPTIONS), config) == 0
    found = {answer["custom_id"]: answer for answer in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    for name, lora in {"labels": None, "scored": LoRARequest("scored", 2, classifier.scored)}.items():
        [want] = llm.classify(TEXTS[1], lora_request=lora, use_tqdm=False)
        assert found[name]["response"]["body"]["data"][0]["probs"] == pytest.approx(want.outputs.probs, abs=1e-5)


def test_a_classifier_embeds_and_generates_nothing(llm):
    assert llm.embed("a", use_tqdm=False)[0].outputs.hidden_size == 48
    with pytest.raises(InvalidRequestError, match="a classifier generates no text") as raised:
        llm.generate("a", use_tqdm=False)
    assert raised.value.param == "model"
    with pytest.raises(InvalidRequestError, match="a classifier generates no text"):
        llm.generate("a", SamplingParams(prompt_logprobs=1, max_tokens=1), use_tqdm=False)
    with pytest.raises(TypeError, match=r"^LLM\.classify\(\) got an unexpected keyword 'prority'"):
        llm.classify("a", prority=1)


def test_other_models_have_no_labels():
    with LLM(speculative_config=None) as llm, pytest.raises(InvalidRequestError, match="no score matrix") as raised:
        llm.classify("a", use_tqdm=False)
    assert raised.value.param == "model"


def _resized(tensors):
    return {**tensors, SCORE: torch.ones(4, 48)}


def _low_rank(tensors):
    names = SCORE.replace("weight", "lora_A.weight"), SCORE.replace("weight", "lora_B.weight")
    return {**tensors, **dict(zip(names, (torch.ones(4, 48), torch.ones(3, 4)), strict=True))}


@pytest.mark.parametrize(
    ("edit", "config", "words"),
    [
        (_resized, {}, r"score: \[4, 48\], expected \[3, 48\] \(3 labels\)"),
        (_low_rank, {}, r"score\.lora_A"),
        (dict, {"modules_to_save": []}, "modules_to_save does not name it"),
        (lambda tensors: {**tensors, SCORE: tensors[SCORE] / 0}, {}, "not finite"),
        (
            lambda tensors: {key: value for key, value in tensors.items() if key != SCORE},
            {},
            "of which the file has no",
        ),
    ],
)
def test_wrong_score_matrices_of_adapters_are_named(classifier, llm, tmp_path, edit, config, words):
    folder = shutil.copytree(classifier.scored, tmp_path / "scored")
    values = json.loads((folder / "adapter_config.json").read_text())
    assert values["modules_to_save"] == ["classifier", "score"]
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    save_file(edit(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=words):
        llm.classify("a", lora_request=LoRARequest("scored", 2, str(folder)), use_tqdm=False)


def test_score_matrix_is_refused_for_a_model_without_one(classifier):
    with LLM(**OPTIONS) as llm, pytest.raises(AdapterError, match=r"score.*for a classifier|no linear module"):
        llm.embed("a", lora_request=LoRARequest("scored", 2, classifier.scored), use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"problem_type": "ranking"}, "problem_type"),
        ({"problem_type": ["regression"]}, "problem_type"),
        ({"id2label": {}}, "id2label"),
        ({"architectures": ["GPTNeoXForSequenceClassification"]}, "unsupported architecture"),
    ],
)
def test_wrong_checkpoints_are_named(classifier, tmp_path, changes, word):
    folder = shutil.copytree(classifier.folder, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(UnsupportedModelError, match=word):
        LLM(str(folder), **OPTIONS)


def test_a_checkpoint_without_its_score_matrix_is_refused(classifier, tmp_path):
    folder = shutil.copytree(classifier.folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"score\.weight"):
        LLM(str(folder), **OPTIONS)
