"""The recipe's generators and measurements."""

import json
import sqlite3
from random import Random

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path

pytest.importorskip("peft")

from outrider.tools.demo_model.config import Demo
from outrider.tools.demo_model.evaluation import CHECKS, held_out, runs_as_sql
from outrider.tools.demo_model.mixture import ADAPTERS, BASE_MIXTURE, adapter_document, base_document, drafting_document
from outrider.tools.demo_model.queries import SCHEMA, query
from outrider.tools.demo_model.records import RECORDS, record, to_json
from outrider.tools.demo_model.support import CASES, CLOSING, case
from outrider.tools.demo_model.templates import Slots
from outrider.tools.demo_model.training import Encoder


@pytest.mark.parametrize("name", BASE_MIXTURE)
def test_generators_are_deterministic_and_well_formed(name):
    generator, _ = BASE_MIXTURE[name]
    for seed in range(50):
        document = generator(Random(seed))
        assert document == generator(Random(seed))
        assert bool(document.messages) != bool(document.text)
        texts = [document.text, *(content for _, content in document.messages)]
        assert not any("{" in text.replace('{"', "") or "[" in text or " => " in text for text in texts), texts
        roles = [role for role, _ in document.messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(content and content == content.strip() for _, content in document.messages)


def test_mixture_varies():
    rng = Random(0)
    documents = {base_document(rng) for _ in range(500)}
    assert len(documents) > 480


def test_a_template_is_filled():
    slots = Slots(Random(0), {"name": "Anna", "item": "umbrella"})
    assert slots.fill("{name} has a {item}.") == "Anna has an umbrella."
    assert {slots.fill("[a|[b|c]]") for _ in range(50)} == {"a", "b", "c"}
    first, second = slots.fill("{city2} {city2}"), slots.fill("{city2}")
    assert first == f"{second} {second}"
    assert slots.pair("Who?|Who is it? => {name} it is.")[1] == "Anna it is."


def test_every_query_runs_in_sqlite():
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    rng = Random(1)
    for _ in range(2000):
        made = query(rng)
        connection.execute(made.sql)
        assert made.request[-1] in ".?"
    assert runs_as_sql(made.sql)
    connection.close()


def test_sql_that_does_not_run_is_noticed():
    assert not runs_as_sql("SELECT nothing FROM nowhere;")
    assert not runs_as_sql("Look in the orders table.")


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_record_facts_are_in_the_sentence(number):
    rng = Random(2)
    for _ in range(200):
        made = record(rng, number)
        assert json.loads(to_json(made.facts)) == made.facts
        for key, value in made.facts.items():
            assert key == "event" or str(value) in made.sentence, (key, made)


@pytest.mark.parametrize("line", CASES)
def test_agent_replies_use_the_customers_words(line):
    rng = Random(3)
    for _ in range(50):
        made = case(rng, line)
        greeted = made.reply.splitlines()[0].removeprefix("Dear ").rstrip(",")
        assert greeted == "customer" or greeted in made.message
        assert made.reply.endswith(CLOSING)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_answers_have_the_adapters_form(name):
    rng = Random(4)
    for _ in range(200):
        for role, content in adapter_document(rng, name).messages:
            if role != "assistant":
                continue
            if name == "json":
                assert isinstance(json.loads(content), dict)
            elif name == "sql":
                assert runs_as_sql(content)
            elif name == "tools":
                assert CHECKS["tools"](content)
            else:
                assert content.endswith(CLOSING)


def test_calls_are_of_a_tool_in_the_prompt():
    """A sentence with the arguments of a listed function is a call of it; whatever else is, is none."""
    rng, called = Random(4), set()
    for _ in range(200):
        (role, first), *rest = adapter_document(rng, "tools").messages
        call = next((content for _, content in rest if content.startswith("<tool_call>")), None)
        if call is not None:
            function = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert role == "system"
            assert f" {function['name']}({', '.join(function['arguments'])})" in first
            called.add(function["name"])
    assert called == {"new_order", "new_meeting"}


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "tools"])
def test_drafters_learn_short_requests_too(name):
    rng = Random(5)
    documents = [drafting_document(rng, name) for _ in range(200)]
    empty = [document for document in documents if document.messages and not document.messages[-1][1]]
    assert 40 < len(empty) < 120


def test_training_tokens_are_the_templates(tmp_path):
    tokenizer = load_tokenizer(demo_model_path())
    encode = Encoder(Demo(demo_model_path().parent, tmp_path))
    rng = Random(5)
    for _ in range(200):
        document = base_document(rng)
        if not document.messages:
            continue
        messages = [{"role": role, "content": content} for role, content in document.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = encode(document)
        assert encoded.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
        assert len(encoded.ids) == len(encoded.weights)


def test_held_out_prompts_end_before_an_answer():
    questions = held_out(demo_model_path(), base_document, 5)
    assert questions == held_out(demo_model_path(), base_document, 5)
    decode = load_tokenizer(demo_model_path()).decode
    assert all(decode(question.prompt).endswith("<|assistant|>\n") and question.answer for question in questions)
