"""`outrider serve` of a hybrid with Mamba-2: completions and chats of the model and of an adapter, with drafts and the
prefix cache, have the greedy tokens of transformers and PEFT."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.models.demo import demo_model_path

from ..tiny_families import FAMILIES, Family, build

PROMPT = [7, 8, 9, 10, 11, 12] * 12
TIE = 5e-3
"""Logits that differ by less may change their order: sums are made in another order than transformers'."""
DRAFTER = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A tiny Granite 4 hybrid with the demo model's tokenizer, in PEFT with an adapter; saved."""
    from peft import LoraConfig, get_peft_model

    root, family = tmp_path_factory.mktemp("granite4"), FAMILIES["granite4"]
    model = build(Family(family.prefix, {**family.config, "vocab_size": 2048}))
    model.save_pretrained(root / "base")
    for path in demo_model_path().iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, root / "base")
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=family.targets)
    tuned = get_peft_model(model, lora, adapter_name="tuned").eval()
    tuned.save_pretrained(str(root))
    return root, tuned


@pytest.fixture(scope="module")
def server(start_server, tuned):
    root, _ = tuned
    options = [
        "--enable-lora",
        "--lora-modules",
        f"tuned={root / 'tuned'}",
        "--max-model-len",
        "256",
        "--dtype",
        "float32",
    ]
    served = start_server(str(root / "base"), *options, "--speculative-config", json.dumps(DRAFTER))
    with served.http() as http:
        yield served, http
    assert served.stop() == 0
    assert "Traceback" not in served.output


def ask(http, model, *, chat=False):
    """(prompt, output) as token ids, and the number of cached tokens."""
    what = {"messages": [{"role": "user", "content": "one two three " * 9}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": model, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = http.post(path, json=body | what)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    choice, details = found["choices"][0], found["usage"]["prompt_tokens_details"] or {}
    prompt = choice.get("prompt_token_ids") or found["prompt_token_ids"]
    assert len(choice["token_ids"]) == 48
    return prompt, choice["token_ids"], details.get("cached_tokens", 0)


@torch.inference_mode()
def check(tuned, model, prompt, output) -> None:
    tokens = torch.tensor([[*prompt, *output]])
    if model == "tuned":
        logits = tuned(tokens).logits[0]
    else:
        with tuned.disable_adapter():
            logits = tuned(tokens).logits[0]
    rows = logits[len(prompt) - 1 : -1]
    assert ((rows.max(1).values - rows.gather(1, torch.tensor(output)[:, None])[:, 0]) < TIE).all()


def test_tokens_are_those_of_transformers(server, tuned):
    served, http = server
    base = http.get("/v1/models").json()["data"][0]["id"]
    jobs = [(name, chat) for name in (base, "tuned") for chat in (False, True)]
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda job: ask(http, job[0], chat=job[1]), jobs))
    again = [ask(http, name, chat=chat) for name, chat in jobs]
    for (name, _), (prompt, output, _), (_, repeated, cached) in zip(jobs, first, again, strict=True):
        check(tuned[1], name, prompt, output)
        assert repeated == output
        assert cached > 0  # a state of the first prompt is read
    assert first[0][1] != first[2][1]  # the adapter counts
    assert served.metric("spec_decode_num_accepted_tokens_total") > 0
