"""Walks over the masks of a grammar, one token a byte: texts that it lets through."""

from __future__ import annotations

import functools
import random

import llguidance
import numpy as np

from outrider import StructuredOutputsParams
from outrider.platform.core.structured_outputs import parser_limits

BYTES = llguidance.LLTokenizer("byte")
CLOSING = b'"]}'
PRINTABLE = range(32, 127)


@functools.lru_cache(4)
def compiled(grammar):
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def make_grammar_text(schema):
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True).grammar_text()


def draw(grammar, rng, limit=300):
    """A text of the grammar, at random; None if it is longer than `limit` bytes."""
    matcher, text = compiled(grammar).deep_copy(), bytearray()
    while len(text) < limit:
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.4):
            return text.decode()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        choices = [byte for byte in allowed.tolist() if byte in PRINTABLE]
        if not choices and matcher.is_accepting():
            return text.decode()
        assert choices, f"nothing follows {text!r}: {matcher.get_error()}"
        closing = [byte for byte in choices if byte in CLOSING]
        byte = rng.choice(closing if closing and rng.random() < 0.35 else choices)
        assert matcher.consume_token(byte)
        text.append(byte)
    return None


def accepts(grammar, text):
    matcher = compiled(grammar).deep_copy()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def drawn(schema, seed, count, limit=300):
    """Texts of the schema, each of which fits it."""
    grammar, rng = make_grammar_text(schema), random.Random(seed)
    texts = [text for _ in range(count) if (text := draw(grammar, rng, limit)) is not None]
    assert len(texts) > count // 4
    return texts
