"""`LLM` of a GGUF file: text, chat and adapters are those of the folder that the file was made of."""

from __future__ import annotations

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path, demo_model_path

from ..gguf_files import write_gguf

PROMPTS = ["SELECT name FROM", "Hello, my order", '{"name": ']
MESSAGES = [{"role": "user", "content": "Where is my order?"}]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """answers(model) -> tokens of greedy text, with and without an adapter, and of a chat."""
    adapter = LoRARequest("sql", path=str(demo_adapters()["sql"]))

    def answer(model, **options):
        llm = LLM(str(model), dtype="float32", enable_lora=True, max_model_len=256, **options)
        greedy = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate([*PROMPTS, *PROMPTS], greedy, lora_request=[None] * 3 + [adapter] * 3, use_tqdm=False)
        outputs += llm.chat(MESSAGES, greedy, use_tqdm=False)
        llm.shutdown()
        return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]

    return answer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    write_gguf(demo_model_path(), path)
    return path


def test_llm(answers, file):
    wanted = answers(demo_model_path())
    assert answers(file) == wanted
    assert wanted[0][1] != wanted[3][1]


def test_draft_model_in_a_file(answers, file, tmp_path):
    write_gguf(demo_draft_path(), tmp_path / "draft.gguf", tokenizer=demo_model_path())
    speculative = {"method": "draft_model", "model": str(tmp_path / "draft.gguf"), "num_speculative_tokens": 3}
    assert answers(file, speculative_config=speculative) == answers(demo_model_path())
