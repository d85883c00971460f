"""The shipped EAGLE-3 head and the adapters' draft weights, in the engine; and how the recipe makes them."""

import json
from functools import partial
from random import Random

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_eagle3_path, demo_model_path

pytest.importorskip("peft")

from outrider.tools.demo_model import heads
from outrider.tools.demo_model.config import DRAFT_LORA_PLANS, HEAD_PLAN
from outrider.tools.demo_model.evaluation import held_out
from outrider.tools.demo_model.folders import DemoFolders
from outrider.tools.demo_model.mixture import adapter_document, base_document
from outrider.tools.demo_model.tokenizer import load_tokenizer

K = 4


@pytest.fixture(scope="module")
def llm():
    config = {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": K}
    options = {"enable_lora": True, "max_loras": 4, "speculative_config": config, "dtype": "bfloat16"}
    with LLM(str(demo_model_path()), **options) as llm:
        yield llm


def acceptance_length(llm, draw, lora=None):
    """Over held-out prompts, as the engine counts."""

    def totals():
        counts = [entry.counts for entry in llm.stats().speculation]
        return sum(c.num_drafts for c in counts), sum(c.num_accepted_tokens for c in counts)

    questions = held_out(load_tokenizer(demo_model_path()), draw, 24)
    before = totals()
    llm.generate(
        [{"prompt_token_ids": question.prompt} for question in questions],
        SamplingParams(temperature=0, max_tokens=100),
        lora,
        use_tqdm=False,
    )
    rounds, accepted = (after - first for after, first in zip(totals(), before, strict=True))
    return 1 + accepted / rounds


def test_the_head_guesses_most_of_what_the_base_says(llm):
    assert acceptance_length(llm, base_document) > 3.5


@pytest.mark.parametrize("name", demo_adapters())
def test_draft_weights_follow_their_adapter(llm, name, tmp_path):
    folder, draw = demo_adapters()[name], partial(adapter_document, name=name)
    plain = tmp_path / name  # the adapter without its draft weights
    plain.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (plain / file).write_bytes((folder / file).read_bytes())
    without = acceptance_length(llm, draw, LoRARequest("plain", path=str(plain)))
    own = acceptance_length(llm, draw, LoRARequest("own", path=str(folder)))
    assert own > without + 0.3
    assert own > 3.0


def test_the_recipe_runs_the_command_line(tmp_path, monkeypatch):
    from outrider.platform.cli import train_draft
    from outrider.platform.cli.main import build_parser

    parsed = []

    def run(command, check):
        assert check
        options = train_draft.resolve(build_parser().parse_args(command[command.index("train-draft") :]))
        train_draft.prepare_output(options)
        parsed.append(options)
        output = tmp_path / "work" / options.output
        files = heads.HEAD_FILES if options.method == "eagle3" else heads.LORA_FILES
        for file in files:
            (output / file).write_text(options.method)

    monkeypatch.setattr(heads.subprocess, "run", run)
    folders = DemoFolders(tmp_path / "output", tmp_path / "work")
    heads.train_head(folders)
    heads.train_draft_adapters(folders, "eagle3")
    heads.train_draft_adapters(folders, "draft_model")
    assert [options.method for options in parsed] == ["eagle3"] + ["draft-lora"] * 6
    assert all(options.generate for options in parsed)
    assert parsed[0].steps == HEAD_PLAN.steps
    assert parsed[1].draft == str(tmp_path / "output" / "eagle3")
    assert (tmp_path / "output" / "eagle3" / "model.safetensors").read_text() == "eagle3"
    assert parsed[4].draft == str(tmp_path / "output" / "draft")
    assert [options.base_name for options in parsed[3:5]] == ["outrider-demo-eagle3", "outrider-demo-draft"]
    made = [(method, name) for method in ("eagle3", "draft_model") for name in demo_adapters()]
    for (method, name), options in zip(made, parsed[1:], strict=True):
        assert options.adapter == str(tmp_path / "output" / "adapters" / name)
        folder = tmp_path / "output" / "adapters" / name / "draft" / method
        assert (folder / "adapter_config.json").exists()
        assert not any(folder.glob("*.jsonl"))
    with open(parsed[1].data) as file:
        lines = [json.loads(line) for line in file]
    assert len(lines) == DRAFT_LORA_PLANS["json"].prompts
    assert lines[0]["messages"][-1]["role"] == "assistant"
    monkeypatch.setattr(heads.subprocess, "run", lambda command, check: parsed.append("--resume" in command))
    heads.train_head(folders)  # a second run goes on
    assert parsed[-1] is True


def test_prompts_are_drawn_from_the_seed(tmp_path):
    heads.write_prompts(tmp_path / "a", base_document, 5, 3)
    heads.write_prompts(tmp_path / "b", base_document, 5, 3)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert len({base_document(Random(seed)) for seed in range(3)}) == 3
