"""The recipe's generators, packing and measurements."""

import json
import sqlite3
from random import Random

import pytest

from outrider.models.demo import demo_model_path

pytest.importorskip("peft")

from outrider.tools.demo_model.batches import BOS_ID, END_ID, Encoded, Encoder, pack
from outrider.tools.demo_model.config import Schedule
from outrider.tools.demo_model.evaluation import acceptance_length, accepted_per_round, runs_as_sql
from outrider.tools.demo_model.mixture import ADAPTER_GENERATORS, BASE_MIXTURE, adapter_document, base_document
from outrider.tools.demo_model.queries import QUERIES, SCHEMA
from outrider.tools.demo_model.records import RECORDS, to_json
from outrider.tools.demo_model.support import CASES, CLOSING, agent_reply, customer_message
from outrider.tools.demo_model.tokenizer import load_tokenizer
from outrider.tools.demo_model.training import rate_factor


@pytest.mark.parametrize("generator", BASE_MIXTURE, ids=lambda generator: generator.__name__)
def test_generators_are_deterministic_and_well_formed(generator):
    for seed in range(50):
        document = generator(Random(seed))
        assert document == generator(Random(seed))
        assert bool(document.messages) != bool(document.text)
        assert "{" not in document.text.replace('{"', "") or "JSON" in document.text  # no unfilled template
        roles = [role for role, _ in document.messages if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(content and content == content.strip() for _, content in document.messages)


def test_mixture_varies():
    rng = Random(0)
    documents = {base_document(rng) for _ in range(500)}
    assert len(documents) > 480


@pytest.mark.parametrize("make", QUERIES, ids=lambda make: make.__name__)
def test_every_query_runs_in_sqlite(make):
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    rng = Random(1)
    for _ in range(200):
        query = make(rng)
        connection.execute(query.sql)
        assert runs_as_sql(query.sql)
        assert query.request[-1] in ".?"
    connection.close()


def test_sql_that_does_not_run_is_noticed():
    assert not runs_as_sql("SELECT nothing FROM nowhere;")
    assert not runs_as_sql("Look in the orders table.")


@pytest.mark.parametrize("make", RECORDS, ids=lambda make: make.__name__)
def test_record_facts_are_in_the_sentence(make):
    rng = Random(2)
    for _ in range(200):
        record = make(rng)
        assert json.loads(to_json(record.facts)) == record.facts
        for key, value in record.facts.items():
            if key not in ("event", "item"):  # an item is named in the plural there
                assert str(value).lower() in record.sentence.lower(), (key, record)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_agent_replies_use_the_customers_words(make):
    rng = Random(3)
    for _ in range(50):
        case = make(rng)
        message, named = customer_message(rng, case)
        reply = agent_reply(case, named)
        assert (case.name in reply) == named or case.name in case.message
        assert case.order in message
        assert case.product in reply
        assert reply.endswith(CLOSING)


@pytest.mark.parametrize("name", ADAPTER_GENERATORS)
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
            else:
                assert content.endswith(CLOSING)


def test_packing_keeps_documents_whole():
    documents = [
        Encoded([BOS_ID, *[10 + i] * n, END_ID], [0.0] + [1.0] * (n + 1)) for i, n in enumerate((5, 9, 3, 7, 14))
    ]
    batch = pack(Random(0), documents, rows=3, length=16)
    flat = batch.ids.tolist()
    for document in documents:
        whole = " ".join(map(str, document.ids))
        assert any(whole in " ".join(map(str, row)) for row in flat)
    assert batch.weights.sum() == sum(sum(document.weights) for document in documents)
    assert (batch.weights[batch.ids == 0] == 0).all()


def test_packing_cuts_what_is_too_long_and_drops_what_does_not_fit():
    batch = pack(Random(0), [Encoded([1] * 30, [1.0] * 30), Encoded([2] * 3, [1.0] * 3)], rows=1, length=8)
    assert batch.ids.tolist() == [[1] * 8]


def test_rate_rises_and_falls():
    schedule = Schedule(steps=100, matrix_rate=1.0, other_rate=1.0, warmup=10)
    factors = [rate_factor(step, schedule) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == 1.0
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert 0 < factors[-1] < 0.02


@pytest.mark.parametrize(
    ("matches", "expected"),
    [
        ([True] * 10, [4, 4]),
        ([False] * 3, [0, 0, 0]),
        ([True, False, True, True, True, True, True], [1, 4]),
        ([True, True, False], [2]),
        ([], []),
    ],
)
def test_accepted_per_round(matches, expected):
    assert accepted_per_round(matches, k=4) == expected


def test_acceptance_length_counts_the_target_token():
    assert acceptance_length([4, 0, 2]) == 3.0


def test_training_tokens_are_the_templates():
    tokenizer = load_tokenizer(demo_model_path())
    encode = Encoder(tokenizer.backend_tokenizer)
    rng = Random(5)
    for _ in range(200):
        document = base_document(rng)
        if not document.messages:
            continue
        messages = [{"role": role, "content": content} for role, content in document.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        encoded = encode(document)
        assert encoded.ids == tokenizer.encode(text, add_special_tokens=False)
        assert len(encoded.ids) == len(encoded.weights)
