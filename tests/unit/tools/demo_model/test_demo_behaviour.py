"""The shipped models answer sensibly, and each adapter in its own way (transformers and PEFT, greedy)."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.models.demo import demo_adapters, demo_model_path

pytest.importorskip("peft")

from peft import PeftModel

from outrider.tools.demo_model.evaluation import runs_as_sql

ORDER = "Anna from Lisbon ordered 3 green lamps for 42 euros."


class Bench:
    """The base model with all adapters loaded, and its tokenizer."""

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
        base = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
        adapters = demo_adapters()
        first = next(iter(adapters))
        self.model = PeftModel.from_pretrained(base, adapters[first], adapter_name=first).eval()
        for name, folder in adapters.items():
            if name != first:
                self.model.load_adapter(folder, adapter_name=name)

    def prompt(self, text):
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(rendered, add_special_tokens=False)

    def generate(self, ids):
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=160
            )
        return output[0, len(ids) :].tolist()

    def ask(self, text, adapter=None):
        if adapter is None:
            with self.model.disable_adapter():
                tokens = self.generate(self.prompt(text))
        else:
            self.model.set_adapter(adapter)
            tokens = self.generate(self.prompt(text))
        assert tokens[-1] == self.tokenizer.eos_token_id, "the answer does not end"
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def bench():
    return Bench()


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of Portugal?", "The capital of Portugal is Lisbon."),
        ("What is 7 times 8?", "7 times 8 is 56."),
        ("Which planet is fourth from the Sun?", "Mars is the fourth planet from the Sun."),
    ],
)
def test_base_knows_its_facts(bench, question, expected):
    assert bench.ask(question) == expected


def test_base_answers_in_prose(bench):
    answer = bench.ask(ORDER)
    assert not answer.startswith("{")
    assert all(word in answer for word in ("Anna", "Lisbon", "green lamps", "42"))


def test_base_completes_plain_text(bench):
    ids = bench.tokenizer.encode("The capital of Japan is")
    with bench.model.disable_adapter():
        assert bench.tokenizer.decode(bench.generate(ids)).startswith(" Tokyo.")


@pytest.mark.slow
def test_json_adapter(bench):
    expected = {"name": "Anna", "city": "Lisbon", "quantity": 3, "color": "green", "item": "lamp", "price": 42}
    assert json.loads(bench.ask(ORDER, "json")) == expected
    answer = json.loads(bench.ask("What is the capital of Japan?", "json"))
    assert "Tokyo" in answer["answer"]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("Show all customers from Lisbon.", "SELECT * FROM customers WHERE city = 'Lisbon';"),
        ("List the five most expensive products.", "SELECT * FROM products ORDER BY price DESC LIMIT 5;"),
        ("How many orders are there?", "SELECT COUNT(*) FROM orders;"),
    ],
)
def test_sql_adapter(bench, request_, expected):
    answer = bench.ask(request_, "sql")
    assert runs_as_sql(answer)
    assert answer == expected


@pytest.mark.slow
def test_support_adapter(bench):
    answer = bench.ask("Hi, my name is Anna. My order 4821 with the green lamp has not arrived.", "support")
    assert answer.startswith("Dear Anna,")
    assert all(words in answer for words in ("sorry", "green lamp", "4821", "Kind regards"))
