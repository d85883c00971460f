"""Real models in float32: greedy text is that of transformers, in every way of computing it."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from outrider import SamplingParams, StructuredOutputsParams
from outrider.platform.http.openai.tools.choice import ToolChoice

from ..e2e.conftest import ServerProcess
from .conftest import SMALL

PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village,", "2 + 2 =", "1, 2, 3, 4, 5, 6,",
    "def fibonacci(n):\n    ", "SELECT name FROM users WHERE", "for (int i = 0; i <", "import torch\nmodel =",
    '{"name": "Ada", "age":', "<html>\n<body>\n  <h1>", "| a | b |\n|---|---|\n| 1 |", "- milk\n- eggs\n-",
    "Q: Why is the sky blue?\nA:", "Translate to French: good morning ->", "Der schnelle braune Fuchs", "La vida es",
    "日本の首都は", "Привет, как", "🎉🎂 Happy", "the the the the the the the", "A", " ", "Dear Sir or Madam,\n\n",
    "Repeat after me: red green blue red green blue red green",
]  # fmt: skip
TEXTS = [
    "🎉👩‍👩‍👧‍👦 naïve café",
    "漢字とかな、中文字符。",
    "def f(x):\n\treturn {x: 'y'}  # 12345",
    "  two  spaces\r\n\ttab ",
    "a" * 999,
]


ORDER = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS = ToolChoice(({"type": "function", "function": {"name": "order", "parameters": ORDER}},), is_forced=True)
THOUGHTS = "".join(f'<think>So {name}.</think>\n{{"name": "{name}", "size": "small"}}\n' for name in ("Ada", "Bob"))
FORMS = [
    ("Order for Ada, in small, as JSON: ", StructuredOutputsParams(json=ORDER)),
    ("A date: ", StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2} (Mon|Tues|Satur)day")),
    ("Is ice cold? ", StructuredOutputsParams(choice=["yes, it is", "yes, always", "no"])),
    ("[", TOOLS.constraint()),
    # Drafts that copy the prompt go over the end of the reasoning into the part with a form.
    (
        f"{THOUGHTS}<think>So",
        StructuredOutputsParams(
            json=ORDER, frame='start: thoughts /\\s*/ @body\nthoughts[lazy]: /(.|\\n)*/ "</think>"'
        ),
    ),
]
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def form_tokens(llm, *adapters, **changes):
    """Tokens of all forms, of the base and of adapters in one batch, greedy and seeded."""
    sampling = {"temperature": 0}, {"temperature": 1.0, "seed": 7}
    wanted = [
        (prompt, SamplingParams(max_tokens=40, structured_outputs=form, **kind, **changes), adapter)
        for prompt, form in FORMS
        for kind in sampling
        for adapter in (None, *adapters)
    ]
    prompts, params, adapters = (list(column) for column in zip(*wanted, strict=True))
    return llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)


@pytest.fixture(scope="session")
def plain_forms(model):
    from outrider import LLM

    llm = LLM(str(model.gguf), dtype="float32", max_model_len=512, kv_cache_memory_bytes=512 << 20, **LORA)
    outputs = form_tokens(llm, model.adapters["attention"], speculative=False)
    llm.shutdown()
    return outputs


def test_forms(plain_forms):
    texts = [output.outputs[0].text for output in plain_forms]
    ends = [output.outputs[0].finish_reason for output in plain_forms]
    for text in texts[:4]:
        assert set(json.loads(text)) == {"name", "size"}
    assert all(re.fullmatch(FORMS[1][1].regex, text) for text in texts[4:8])
    assert set(texts[8:12]) <= set(FORMS[2][1].choice)
    for text, end in zip(texts[12:16], ends[12:16], strict=True):
        assert end == "length" or {call["name"] for call in json.loads(text)} == {"order"}
    assert "</think>" in texts[16]
    assert len(set(texts)) > len(FORMS)


@pytest.fixture(scope="session")
def plain(model, greedy):
    """Outputs of all prompts without speculation, from the GGUF file."""
    from outrider import LLM

    llm = LLM(str(model.gguf), dtype="float32", max_model_len=512, max_num_seqs=32, kv_cache_memory_bytes=512 << 20)
    outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    llm.shutdown()
    return outputs


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_drafts(llm, model, plain, plain_forms, greedy, drafted, *, loads):
    """The text is that without drafts: of prompts, and of forms by the base, an adapter, and the same adapter with
    draft weights. `loads`: the drafter reads them."""
    assert tokens(llm.generate(PROMPTS, greedy, use_tqdm=False)) == tokens(plain)
    outputs = form_tokens(llm, model.adapters["attention"], drafted)
    with_drafts = outputs[2::3]
    assert tokens(outputs[::3]) == tokens(plain_forms[::2])
    assert tokens(outputs[1::3]) == tokens(with_drafts) == tokens(plain_forms[1::2])
    assert {info.name: info.draft for info in llm.adapters.list()} == {
        "attention": "",
        "drafted": "loaded" if loads else "",
    }


def test_prompts(plain, reference, check_greedy):
    assert len(plain) == 24
    for output in plain:
        check_greedy(reference, output)


def test_folder(model):
    """The file's packed weights and the folder's bfloat16 ones differ by rounding: texts may part at a tie alone."""
    from outrider import LLM

    llm = LLM(str(model.folder), dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=128 << 20)
    other = LLM(str(model.gguf), max_model_len=256, kv_cache_memory_bytes=128 << 20)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
    for one, two in zip(*(side.generate(PROMPTS[:4], params, use_tqdm=False) for side in (llm, other)), strict=True):
        pairs = zip(one.outputs[0].token_ids, two.outputs[0].token_ids, strict=True)
        parted = next((index for index, (first, second) in enumerate(pairs) if first != second), None)
        if parted is not None:
            best, second = sorted((entry.logprob for entry in two.outputs[0].logprobs[parted].values()), reverse=True)[
                :2
            ]
            assert best - second < 0.13  # a step of bfloat16 between logits of 16 and 32
    llm.shutdown()
    other.shutdown()


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "adaptive"])
def test_drafters(method, model, make_llm, plain, plain_forms, greedy, tmp_path):
    config = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    if method == "adaptive":
        config = {"method": "draft_model"}  # n-gram is its fallback
    if loads := config["method"] == "draft_model":
        config["model"] = str(model.gguf)
    llm = make_llm(speculative_config=config, **LORA)
    drafted = model.drafted("attention", tmp_path / "drafted")
    check_drafts(llm, model, plain, plain_forms, greedy, drafted, loads=loads)


def write_random_head(folder, target):
    """An EAGLE-3 head of one layer with random weights. It uses the target's embeddings and head."""
    raw = json.loads((target / "config.json").read_text())
    hidden, inner, heads, dim = raw["hidden_size"], 512, 4, 64
    shapes = {
        "fc": (hidden, 3 * hidden), "norm": (hidden,),
        **{f"layers.0.{name}": (hidden,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        **{f"layers.0.self_attn.{name}_proj": (heads * dim, 2 * hidden) for name in "qkv"},
        "layers.0.self_attn.o_proj": (hidden, heads * dim), "layers.0.mlp.down_proj": (hidden, inner),
        **{f"layers.0.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": hidden, "head_dim": dim,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": heads,
        "vocab_size": raw["vocab_size"], "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_heads(method, model, make_llm, plain, plain_forms, greedy, tmp_path):
    from outrider.spec_decode.training.data import Sample
    from outrider.spec_decode.training.options import TrainOptions
    from outrider.spec_decode.training.run import train_draft

    if method == "eagle3" and model.name.startswith("gemma"):  # heads for it are served, but not trained here
        write_random_head(tmp_path, model.folder)
    else:
        samples = [Sample([*output.prompt_token_ids, *output.outputs[0].token_ids], 1) for output in plain]
        options = TrainOptions(
            method=method, model=str(model.folder), data="", output=str(tmp_path), steps=2, warmup=1, dtype="float32",
            batch_tokens=256, eval_every=1000, progress=False, medusa_heads=2,
        )  # fmt: skip
        train_draft(options, samples, samples[:1])
    llm = make_llm(speculative_config={"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}, **LORA)
    drafted = model.drafted("attention", tmp_path / "drafted", head=tmp_path)
    check_drafts(llm, model, plain, plain_forms, greedy, drafted, loads=True)


def test_chunks_and_prefix_hits(make_llm, reference, check_greedy, greedy):
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=8)
    long = "\n".join(PROMPTS)
    first, second = (llm.generate([long, f"{long}\nAnd then"], greedy, use_tqdm=False) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert second[0].num_cached_tokens > 64
    for output in first:
        check_greedy(reference, output)


def test_adapters_in_one_batch_with_the_base(model, make_llm, plain, check_greedy, greedy):
    llm = make_llm(enable_lora=True, max_loras=3, max_lora_rank=8)
    chosen = [None, *model.adapters.values()] * 3
    prompts = PROMPTS[:12]
    outputs = llm.generate(prompts, greedy, lora_request=chosen, use_tqdm=False)
    assert tokens(outputs)[::4] == tokens(plain)[:12:4]
    for index, adapter in enumerate(model.adapters.values(), 1):
        reference = model.reference(adapter)
        for output in outputs[index::4]:
            check_greedy(reference, output)
    assert tokens(outputs) != tokens(plain)[:12]


def test_tokenizer(model):
    from outrider.models.checkpoint.tokenizer import load_tokenizer

    ours, theirs = load_tokenizer(model.gguf), load_tokenizer(model.folder)
    for text in [*TEXTS, *PROMPTS]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        assert max(ids) < len(theirs)
    messages = [{"role": "user", "content": text} for text in TEXTS[:1]]
    if ours.chat_template is not None:
        text = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert TEXTS[0] in text
        ids = ours.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.decode(ids) == text


def test_long_context(make_llm, reference, check_greedy):
    llm = make_llm(max_model_len=6400, max_num_batched_tokens=2048, max_num_seqs=1)
    prompt = [int(token) for token in torch.randint(1000, 20000, (6000,), generator=torch.Generator().manual_seed(0))]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(output.prompt_token_ids) == 6000
    check_greedy(reference, output)


def test_server_of_the_file(model, tethered):
    """The conversation of docs/guides/models.md."""
    adapter = f"scaled={model.adapters['scaled'].path}"
    server = ServerProcess(str(model.gguf), "--enable-lora", "--lora-modules", adapter, tethered=tethered)
    try:
        server.wait_until_ready()
        client, messages = server.client(), [{"role": "user", "content": "What is the capital of France?"}]
        assert [found.id for found in client.models.list().data] == [model.gguf.stem, "scaled"]
        if model.name != SMALL:
            return
        answers = [
            client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=24)
            for name in (model.gguf.stem, "scaled")
        ]
        base, adapted = (answer.choices[0].message.content for answer in answers)
        assert base == "The capital of France is Paris."
        assert adapted != base
    finally:
        server.stop()
