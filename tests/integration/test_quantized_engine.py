"""Engines of quantised weights: drafts change no text, and adapters are PEFT's on the dequantised model."""

from __future__ import annotations

import shutil

import pytest
import torch

from outrider import LoRARequest
from outrider.platform.core.errors import InvalidRequestError

from ..quantized_files import CASES, write_quantized
from .conftest import TARGETS


@pytest.fixture(scope="module")
def packed(models, tmp_path_factory):
    """packed("gptq-row") -> folder of the target in that format."""

    def write(kind):
        folder = tmp_path_factory.mktemp(kind)
        write_quantized(models.target, folder, CASES[kind])
        return folder

    return write


@pytest.mark.parametrize(
    ("kind", "options", "method", "rounding"),
    [
        ("gptq-row", {}, "draft_model", "int8"),
        ("ct-w8a8", {"max_num_batched_tokens": 48}, "eagle3", "int8"),
        ("fp8-blocks", {}, "eagle", "fp8"),
        (None, {"quantization": "int8"}, "medusa", "int4"),
        ("gptq-row", {}, "dflash", "int8"),
        (None, {"quantization": "int8"}, "dspark", "int4"),
        (None, {"quantization": "int4", "dtype": "bfloat16", "batch_invariant": True}, "draft_model", "int4"),
    ],
)
def test_drafts_do_not_change_the_text(make_engine, models, run, jobs, greedy, packed, kind, options, method, rounding):
    values = {"enable_lora": True, "max_lora_rank": 8} | options
    if kind is not None:
        values["model"] = str(packed(kind))
    work = jobs(greedy, adapters=True)
    plain = run(make_engine(**values), work)
    speculative = models.speculative(method, 3) | {"quantization": rounding}
    drafted = run(make_engine(**values, speculative_config=speculative), work)
    assert [outcome.token_ids for outcome in drafted] == [outcome.token_ids for outcome in plain]


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_pefts_on_the_dequantised_model(make_engine, run, prompts, greedy, packed, tmp_path, dora):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = packed("gptq-row")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, use_dora=dora)
    torch.manual_seed(5)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "dense"), config).save_pretrained(tmp_path / "adapter")
    dense = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    reference = PeftModel.from_pretrained(dense, tmp_path / "adapter").eval()
    lora = LoRARequest("x", path=str(tmp_path / "adapter"))
    engine = make_engine(model=str(folder), enable_lora=True)
    for prompt, outcome in zip(prompts, run(engine, [(p, greedy, lora) for p in prompts]), strict=True):
        text = [*prompt, *outcome.token_ids]
        with torch.no_grad():
            logits = reference(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(outcome.token_ids)[:, None])[:, 0]
        assert float((logits.amax(1) - chosen).max()) < 1e-3


@pytest.mark.parametrize(("method", "kind"), [("eagle3", "gptq-row"), ("dflash", "fp8-blocks"), ("dspark", "ct-w8a8")])
def test_a_quantised_head(make_engine, models, run, jobs, greedy, tmp_path, method, kind):
    """A head whose file is quantised drafts as one with the same dense weights."""
    head, packed = models.head(method), tmp_path / "head"
    write_quantized(head, packed, CASES[kind])
    for file in head.iterdir():
        if file.is_file() and not (packed / file.name).exists():
            shutil.copy(file, packed)
    work, accepted = jobs(greedy, adapters=False), []
    for folder in (packed, packed / "dense"):
        speculative = models.speculative(method, 3) | {"model": str(folder)}
        outcomes = run(make_engine(speculative_config=speculative), work)
        accepted.append([outcome.accepted for outcome in outcomes])
    assert accepted[0] == accepted[1]


def test_info_has_the_format_and_its_memory(make_engine, packed):
    info = make_engine(quantization="int8").info
    assert info.quantization == "int8 (rounded while loading)"
    assert 8 < 8 * info.weight_bytes / info.num_parameters < 11
    info = make_engine(model=str(packed("gptq-row"))).info
    assert info.quantization == "gptq 4 bits"
    assert make_engine().info.quantization == ""


def test_methods_that_do_not_fit_are_refused(make_engine, packed):
    with pytest.raises(InvalidRequestError, match="gptq"):
        make_engine(model=str(packed("gptq-row")), quantization="int8")
    with pytest.raises(InvalidRequestError, match="quantization"):
        make_engine(speculative_config={"method": "ngram", "quantization": "int8"})
