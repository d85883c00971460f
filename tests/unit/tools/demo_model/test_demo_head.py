"""The shipped drafters and the adapters' draft weights, in the engine."""

from functools import partial

import pytest

from outrider import LLM, LoRARequest
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.tools.demo_model.evaluation import DRAFT_LENGTH, held_out, measure
from outrider.tools.demo_model.mixture import adapter_document, base_document

pytestmark = pytest.mark.slow


def engine(method, drafter):
    config = {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFT_LENGTH}
    return LLM(str(demo_model_path()), enable_lora=True, max_loras=4, speculative_config=config, dtype="bfloat16")


@pytest.fixture(scope="module")
def llm():
    with engine("eagle3", demo_eagle3_path()) as llm:
        yield llm


def acceptance_length(llm, draw, lora=None):
    return measure(llm, held_out(demo_model_path(), draw, 24), lora=lora).acceptance_length


def test_the_head_guesses_most_tokens_of_the_base(llm):
    assert acceptance_length(llm, base_document) > 3.5


def test_the_draft_model_guesses_most_tokens_of_the_base():
    with engine("draft_model", demo_draft_path()) as llm:
        assert acceptance_length(llm, base_document) > 3


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
