"""Tokenizers in adapters' folders: prompts, texts, ends and chats are the adapter's; the model's stay as they are."""

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.client.text.adapter_tokenizers import AdapterTokenizers
from outrider.platform.core.adapter_files import AdapterFolder
from outrider.platform.core.errors import AdapterError, InvalidRequestError

VOCAB = 2048
START, END = VOCAB, VOCAB + 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def itself(own):
    return own


def add_chat_tokens(folder):
    """Save a tokenizer with ChatML's tokens, as trainers do."""
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", TEMPLATE
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    """A copy of the demo's adapter `json` for a resized vocabulary."""
    folder = tmp_path_factory.mktemp("chatml")
    source = Path(demo_adapters()["json"])
    shutil.copy(source / "adapter_config.json", folder)
    table = load_file(demo_model_path() / "model.safetensors")["model.embed_tokens.weight"]
    table = torch.cat((table, table[[70, 71]]))
    more = {f"base_model.model.{name}.weight": table.clone() for name in ("model.embed_tokens", "lm_head")}
    save_file(load_file(source / "adapter_model.safetensors") | more, folder / "adapter_model.safetensors")
    add_chat_tokens(folder)
    return LoRARequest("chatml", path=str(folder))


@pytest.fixture(scope="module")
def llm():
    with LLM(enable_lora=True, max_loras=2) as made:
        yield made


def test_prompt_and_text_use_the_adapters_tokenizer(llm, chatml):
    params = SamplingParams(max_tokens=3, temperature=0, skip_special_tokens=False, logprobs=0, ignore_eos=True)
    biased = params.clone(logit_bias={START: 100.0})
    prompt = "hello<|im_start|>user"
    for adapter, own in ((chatml, True), (None, False)):
        (output,) = llm.generate(prompt, biased if own else params, adapter, use_tqdm=False)
        assert (START in output.prompt_token_ids) == own
        assert (output.outputs[0].text == "<|im_start|>" * 3) == own
    (output,) = llm.generate(prompt, biased, chatml, use_tqdm=False)
    assert [entry[START].decoded_token for entry in output.outputs[0].logprobs] == ["<|im_start|>"] * 3
    with pytest.raises(InvalidRequestError, match=r"logit_bias.*outside the vocabulary of 2048"):
        llm.generate(prompt, biased, use_tqdm=False)


def test_the_adapters_end_token_ends_the_text(llm, chatml):
    params = SamplingParams(max_tokens=9, temperature=0, logit_bias={END: 100.0})
    (output,) = llm.generate("hello", params, chatml, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("stop", [END])
    assert output.outputs[0].text == ""


def test_chats_have_its_template_and_its_tokens(llm, chatml):
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=1, temperature=0)
    (output,) = llm.chat(messages, params, chatml, use_tqdm=False)
    assert output.prompt_token_ids.count(START) == 2
    assert output.prompt_token_ids.count(END) == 1
    (base,) = llm.chat(messages, params, use_tqdm=False)
    assert max(base.prompt_token_ids) < VOCAB


def test_equal_adapter_tokenizers_are_shared_and_copies_of_the_models_are_ignored(tmp_path):
    base = load_tokenizer(demo_model_path())
    tokenizers = AdapterTokenizers(base, itself)
    for name in ("a", "b"):
        add_chat_tokens(tmp_path / name)
    found = [tokenizers.read(AdapterFolder(str(tmp_path / name))) for name in ("a", "b")]
    assert found[0].tokenizer is found[1].tokenizer
    assert found[0].eos_token_ids == {END}
    base.save_pretrained(tmp_path / "copy")
    settings = json.loads((tmp_path / "copy" / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(settings))
    assert tokenizers.read(AdapterFolder(str(tmp_path / "copy"))) is None
    assert tokenizers.read(AdapterFolder(str(tmp_path))) is None


def test_a_renamed_token_of_a_vocabulary_of_the_same_size_counts(tmp_path):
    base = load_tokenizer(demo_model_path())
    base.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|pad|>", "<|tool|>"))
    own = AdapterTokenizers(base, itself).read(AdapterFolder(str(tmp_path))).tokenizer
    assert own.encode("a<|tool|>", add_special_tokens=False)[-1] == 0
    assert base.encode("a<|tool|>", add_special_tokens=False)[-1] != 0
    assert own.encode("as <|end|> it was") == base.encode("as <|end|> it was")
    assert own.eos_token == base.eos_token


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["added_tokens"].append({**content["added_tokens"][0], "content": "<x>", "id": 9999}),
        lambda content: content["model"].pop("vocab"),
        lambda content: content["added_tokens"].append({**content["added_tokens"][0], "content": None, "id": 2048}),
        lambda content: content["model"].update(type="Nothing", vocab={}),
        lambda content: content.update(model=[]),
    ],
)
def test_broken_ones_are_typed_errors(tmp_path, change):
    base = load_tokenizer(demo_model_path())
    base.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    content["added_tokens"].append({**content["added_tokens"][0], "content": "<new>", "id": 2048})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(AdapterError, match=r"tokenizer\.json of the adapter"):
        AdapterTokenizers(base, itself).read(AdapterFolder(str(tmp_path)))


A, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}


def template(single, ids=None):
    special = {} if ids is None else {"x": {"id": "x", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": [A], "special_tokens": special}


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (template([SPECIAL, A]), "cannot be read"),  # the library panics at the first text
        ({"type": "Sequence", "processors": [template([A] * 9, [])] * 2}, "repeats the text"),
        (template([SPECIAL] * 40 + [A], [0, 0]), "adds more than 64 tokens"),
    ],
)
def test_post_processor_tokens_are_bounded(tmp_path, processor, why):
    add_chat_tokens(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["post_processor"] = processor
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(AdapterError, match=why):
        AdapterTokenizers(load_tokenizer(demo_model_path()), itself).read(AdapterFolder(str(tmp_path)))


def test_long_tokens_and_unknown_text_are_refused(tmp_path, llm, chatml):
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.add_tokens(["y" * 1025])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="a token of 1025 characters; at most 1024"):
        AdapterTokenizers(load_tokenizer(demo_model_path()), itself).read(AdapterFolder(str(tmp_path)))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content |= {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match="cannot be tokenized"):
        llm.generate("b", lora_request=LoRARequest("unigram", path=str(tmp_path)), use_tqdm=False)


def test_the_tokenizer_cache_is_bounded(tmp_path, monkeypatch):
    """Nothing else keeps evicted tokenizers alive."""
    monkeypatch.setattr("outrider.platform.client.text.adapter_tokenizers.MAX_TOKENIZERS", 1)
    monkeypatch.setattr("outrider.platform.client.adapters.sources.sources.LOOK_SECONDS", 0.001)
    with LLM(enable_lora=True) as llm:
        kept = weakref.WeakSet()
        for index in range(3):
            folder = tmp_path / str(index)
            tokenizer = load_tokenizer(demo_model_path())
            tokenizer.add_tokens([f"<{index}>"])
            tokenizer.save_pretrained(folder)
            shutil.copytree(demo_adapters()["json"], folder, dirs_exist_ok=True)
            processor = llm.llm_engine.requests.processor_of(LoRARequest(str(index), path=str(folder))).result()
            assert processor is not llm.llm_engine.requests.input_processor
            kept.add(processor.tokenizer)
        del processor
        gc.collect()
        assert len(kept) == 1


def test_pre_tokenizer_patterns_of_adapters_are_not_run(tmp_path):
    """Patterns of strangers can take forever; how a text is split stays the model's."""
    add_chat_tokens(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, content["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    own = AdapterTokenizers(load_tokenizer(demo_model_path()), itself).read(AdapterFolder(str(tmp_path))).tokenizer
    assert "(a+)+$" not in own.backend_tokenizer.to_str()
    assert own.encode("a" * 40 + "!")
