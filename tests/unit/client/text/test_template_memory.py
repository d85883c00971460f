"""Templates that ask for gigabytes: a typed error, at once."""

from __future__ import annotations

import resource

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.client.text.chat_template import render_messages
from outrider.platform.core.errors import InvalidRequestError

ALLOWED = 600 << 20
"""Bytes by which the largest resident size may grow, in this process, over all cases."""
EXPRESSIONS = {
    "product": "{{ 'x' * 10**10 }}",
    "product of a list": "{{ ([1] * 10**10)|length }}",
    "swapped product": "{{ 10**9 * 'xxxxxxxxxx' }}",
    "power": "{{ 9**(9**9) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "starred percent": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:10000000000d}'.format(1) }}",
    "nested format": "{{ '{:{}d}'.format(1, 10**9) }}",
    "format_map": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "many fields": "{% set x = 'y' * 10**6 %}{{ ('{0}' * 10**5).format(x) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "to_bytes": "{{ (1).to_bytes(10**10, 'big')|length }}",
    "replace": "{% set x = 'y' * 10**6 %}{{ x.replace('y', x)|length }}",
    "empty replace": "{% set x = 'y' * 10**6 %}{{ x.replace('', x)|length }}",
    "join": "{% set x = 'y' * 10**6 %}{{ x.join(x)|length }}",
    "translate": "{% set x = 'y' * 10**6 %}{{ x.translate({121: x})|length }}",
    "center filter": "{{ 'x'|center(10**10) }}",
    "indent filter": "{{ ('\n' * 10**6)|indent(10**5, blank=true)|length }}",
    "replace filter": "{% set x = 'y' * 10**6 %}{{ x|replace('y', x)|length }}",
    "join filter": "{% set x = 'y' * 10**6 %}{{ range(10**5)|join(x)|length }}",
    "mapped filter": "{{ ['x']|map('center', 10**10)|join }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list|length }}",
    "slice": "{{ [1]|slice(10**10)|list|length }}",
    "tojson": "{{ [[1]]|tojson(indent=10**10) }}",
    "range": "{{ range(10**9)|list|length }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "doubling": "{% set n = namespace(x='y') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x='y') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x }}",
    "nested json": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x|tojson }}",
    "nested text": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x|string|length }}",
    "output": "{% set x = 'y' * 10**6 %}{% for i in range(10**5) %}{{ x }}{% endfor %}",
    "set block": "{% set x = 'y' * 10**6 %}{% set z %}{% for i in range(10**5) %}{{ x }}{% endfor %}{% endset %}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='y') %}"
    "{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
    "kept": "{% set n = namespace(l=[]) %}{% for i in range(10**4) %}{% set n.l = n.l + ['y' * 10**6] %}{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_gigabytes(tokenizer, name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = EXPRESSIONS[name] + "{{ messages[0].content }}"
    with pytest.raises(InvalidRequestError, match=r"wants too much memory|Range too big|undefined") as caught:
        render_messages(tokenizer, [{"role": "user", "content": "Hello"}], {"chat_template": template})
    assert caught.value.param == "messages"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < ALLOWED


@pytest.mark.slow
def test_a_long_conversation_is_rendered_as_before(tokenizer):
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} é" * 3000} for i in range(301)]
    text = render_messages(tokenizer, messages, {})
    assert all(message["content"] in text for message in messages)
    template = "{% for m in messages %}{{ m.role|upper ~ ': ' ~ m['content'].strip()|indent(2) + '\\n' }}{% endfor %}"
    template += "{{ '%s-%d' % ('a', 5) }}{{ '{:>4}'.format(7) }}{{ '-' * 80 }}{{ [1, {'a': none}]|tojson(indent=2) }}"
    text = render_messages(tokenizer, messages[:1], {"chat_template": template})
    assert text.endswith("a-5   7" + "-" * 80 + '[\n  1,\n  {\n    "a": null\n  }\n]')
