"""Adapters with tokenizers of their own behind a real server: grammars, reasoning, calls and the log know them."""

import json
import shutil
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_adapters, demo_model_path

# The comment says how calls are written, the end of the prompt that the answer begins with reasoning.
TEMPLATE = "{# <tool_call> #}{{ tools or '' }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
SCHEMA = {"name": "answer", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
FORMAT = {"type": "json_schema", "json_schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def thinking(folder):
    """An adapter that adds the token <think>, and ends prompts with it."""
    source = Path(demo_adapters()["json"])
    shutil.copytree(source, folder)
    table = load_file(demo_model_path() / "model.safetensors")["model.embed_tokens.weight"]
    table = torch.cat((table, table[[70]]))
    more = {f"base_model.model.{name}.weight": table.clone() for name in ("model.embed_tokens", "lm_head")}
    save_file(load_file(source / "adapter_model.safetensors") | more, folder / "adapter_model.safetensors")
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def renaming(folder, first="a", second="b"):
    """An adapter in whose tokenizer two tokens have changed places."""
    shutil.copytree(demo_adapters()["json"], folder)
    load_tokenizer(demo_model_path()).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def own_server(start_server, tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    modules = f"thinking={thinking(root / 'thinking')}", f"renaming={renaming(root / 'renaming')}"
    return start_server("--enable-lora", "--lora-modules", *modules, "--reasoning-parser", "qwen3", "--log-prompts")


def chat(server, model, **fields):
    messages = [{"role": "user", "content": "I have a box"}]
    return server.client().chat.completions.create(
        model=model, messages=messages, temperature=0, **({"max_tokens": 6} | fields)
    )


def test_grammars_are_refused_for_other_token_ids(own_server):
    """The model's grammar would allow the wrong tokens."""
    for fields, source in (
        ({"response_format": FORMAT}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "[ab]+"}}}, "structured_outputs"),
    ):
        with pytest.raises(
            openai.BadRequestError, match=r"gives tokens of the model other ids, such as '[ab]'"
        ) as error:
            chat(own_server, "renaming", **fields)
        assert error.value.param.startswith(source)
    answer = chat(own_server, "outrider-demo", response_format=FORMAT, max_tokens=40).choices[0]
    assert answer.finish_reason == "length" or "a" in json.loads(answer.message.content)
    assert chat(own_server, "renaming").choices[0].message.content


def test_reasoning_begins_with_the_adapters_token(own_server):
    own, base = (chat(own_server, model).choices[0].message for model in ("thinking", "outrider-demo"))
    assert own.content is None
    assert own.reasoning_content
    assert base.content
    assert getattr(base, "reasoning_content", None) is None


def test_calls_are_written_as_the_adapters_template_says(own_server):
    """Neither the model's template nor an option of the server says it."""
    assert chat(own_server, "thinking", tools=[TOOL]).choices[0].message.reasoning_content


def test_the_log_has_the_adapters_text(own_server):
    own_server.client().completions.create(model="thinking", prompt="words<think>", max_tokens=1)
    own_server.client().completions.create(model="renaming", prompt="cab", max_tokens=1)
    own_server.wait_for(lambda: "words<think>" in own_server.output and "cab" in own_server.output, 10)
