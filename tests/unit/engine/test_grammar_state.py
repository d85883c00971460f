"""Sequences in their grammars: the texts that their masks allow, independent of drafts that were tried."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from outrider import InvalidRequestError, SamplingParams, StructuredOutputsParams
from outrider.models.demo import demo_model_path
from outrider.platform.core.request import Request
from outrider.platform.engine.sampling.grammar_state import MAX_FORCED
from outrider.platform.engine.sampling.grammars import KEPT_BYTES, Grammars
from outrider.platform.engine.sampling.list_end import ListProgress

NEVER = float("inf")


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_file=str(demo_model_path() / "tokenizer.json"))


@pytest.fixture
def grammars(tokenizer):
    made = Grammars(lambda: tokenizer, len(tokenizer))
    made.prepare()
    yield made
    made.close()


def make_state(grammars, ends=(0,), max_tokens=None, **constraint):
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**constraint))
    request = Request("r", [1], 1, params, seed_key=0, eos_token_ids=frozenset(ends))
    while grammars.admit(request) is not None:
        grammars.wait(1.0)
    return request.grammar


def allowed(mask):
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def walk(state, rng, ends, most=60, tries=0):
    """Random tokens that the masks allow; before each one some `tries` are undone."""
    tokens = []
    for _ in range(most):
        drafts = []
        for _ in range(tries):
            state.fill(tokens, drafts, NEVER)
            masks = state.masks(tokens, drafts)
            if len(masks) <= len(drafts) or not (choices := allowed(masks[-1])):
                break
            drafts.append(rng.choice(choices))
        if tries:
            state.forced(tokens, MAX_FORCED, NEVER)
        state.fill(tokens, [], NEVER)
        tokens.append(random.Random(len(tokens)).choice(allowed(state.masks(tokens, [])[0])))
        if tokens[-1] in ends:
            break
    return tokens


CONSTRAINTS = {
    "regex": {"regex": "[a-f]{3,40}( [0-9]{2}){2}"},
    "json": {"json": {"type": "object", "properties": {"name": {"enum": ["Anna", "Annabel"]}}, "required": ["name"]}},
    "choice": {"choice": ["yes indeed", "yes", "no"]},
    "lark": {"grammar": 'start: "(" (start | /[a-c]{1,3}/) ")"'},
    "max_tokens": {"grammar": 'start: name ": " name\nname[max_tokens=3]: /[a-z]+/'},
    "stop": {"grammar": 'start: line "!" line\nline[stop=";"]: /[a-z;]+/'},
    "suffix": {"grammar": 'start: line line\nline[suffix=";"]: /[a-z]+/'},
    "lazy": {"grammar": 'start: line "b"\nline[lazy]: /[a-z]+;/'},
    "temperature": {"grammar": 'start: line "!"\nline[temperature=0.5]: /[a-z]{2,5}/'},
    "gbnf": {"grammar": 'root ::= "x" [0-9]+ | "y" root'},
    "tag": {"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}},
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_drafts_that_were_undone_change_no_mask(grammars, name):
    for seed in range(3):
        plain = walk(make_state(grammars, **CONSTRAINTS[name]), random.Random(seed), {0})
        tried = walk(make_state(grammars, **CONSTRAINTS[name]), random.Random(seed), {0}, tries=4)
        assert plain == tried


def test_a_text_without_a_choice_has_the_tokenizers_own_tokens(grammars, tokenizer):
    text = '{"order": "green lamps for Anna in Lisbon"}'
    state = make_state(grammars, regex=re.escape(text))
    forced = state.forced([], MAX_FORCED, NEVER)
    assert tokenizer.decode(forced) == text
    assert forced == tokenizer.encode(text, add_special_tokens=False)


def test_forced_tokens_end_at_a_choice(grammars, tokenizer):
    state = make_state(grammars, regex="only this (one|two)!")
    assert tokenizer.decode(state.forced([], MAX_FORCED, NEVER)) == "only this", (
        "the space may be part of the next token"
    )
    assert state.forced([], MAX_FORCED, 0.0) == [], "the deadline has passed"


def test_the_requests_own_tokens_end_its_answer(grammars):
    """One compiled grammar serves requests, and adapters, with other end tokens."""
    for ends in ((0,), (5, 9), (0,)):
        state = make_state(grammars, ends, choice=["a", "ab"])
        tokens = walk(state, random.Random(1), set())
        assert set(tokens[-8:]) <= set(ends)
        state.fill(tokens, [], NEVER)
        assert allowed(state.masks(tokens, [])[0]) == list(ends)
    assert grammars.num_kept == 1


def test_a_long_bounded_text_outlives_its_lexer(grammars):
    """A matcher with too many lexer states starts again; it visited 16,384 long before this text ends."""
    state = make_state(grammars, regex=r"(\p{L}{1,500} ){1,500}")
    tokens = walk(state, random.Random(3), {0}, most=900)
    assert len(tokens) == 900 or tokens[-1] == 0
    assert not state.problem


@pytest.mark.slow
@pytest.mark.parametrize("attribute", ["", "[max_tokens=400]"])
def test_sequences_share_a_lexer_that_becomes_full(grammars, attribute):
    text = f'start: "q" word\nword{attribute}: /(\\p{{L}}{{1,500}} ){{1,500}}/'
    states = [make_state(grammars, grammar=text) for _ in range(2)]
    tokens: list[list[int]] = [[], []]
    rng = random.Random(5)
    for _ in range(350):
        for state, own in zip(states, tokens, strict=True):
            state.fill(own, [], NEVER)
            choices = [token for token in allowed(state.masks(own, [])[0]) if token]
            assert choices, state.problem
            own.append(rng.choice(choices))
    assert not any(state.problem for state in states)
    assert states[0].grammar.num_renewals > 0


def test_a_grammar_that_becomes_too_complex_is_an_error(grammars):
    state = make_state(grammars, grammar='start: a{0,400}\na: b{0,10}\nb: "x"{0,10}')
    tokens = []
    while not state.problem and len(tokens) < 400:
        state.fill(tokens, [], NEVER)
        tokens.append(max(allowed(state.masks(tokens, [])[0]), default=0))
    assert "too complex" in state.problem or "ambiguous" in state.problem


@pytest.mark.slow
def test_compiled_grammars_are_kept_by_bytes_and_failures_cost_nothing(grammars):
    largest = "x" * 60_000
    for index in range(8):
        make_state(grammars, regex=f"{largest}{index}")
    assert 1 < grammars.num_kept < 8
    assert grammars.kept_bytes <= KEPT_BYTES
    for index in range(200):
        with pytest.raises(InvalidRequestError):
            make_state(grammars, grammar=f"start: nothing{index}")
    make_state(grammars, regex="last")
    assert grammars.kept_bytes <= KEPT_BYTES


def test_a_long_text_without_a_choice_costs_no_more_than_a_short_one(grammars):
    """Each step tokenizes the text that it may propose, not the rest."""
    state = make_state(grammars, regex="a{150000}")
    forced = state.forced([], MAX_FORCED, NEVER)
    assert len(forced) == MAX_FORCED
    assert state.seconds < 0.2


@pytest.mark.parametrize(
    ("regex", "before", "texts"),
    [('": (-?[0-9]+|true)', '":', {" ", " -", " t", " tr"}), ("a (cat|x)", "a", {" ", " c", " ca"})],
)
def test_a_text_with_a_longer_tokenization_is_not_forced(grammars, tokenizer, regex, before, texts):
    """After `":` a number may begin with " -", or with " " before a digit: neither is the only one."""
    state = make_state(grammars, regex=regex)
    tokens = tokenizer.encode(before, add_special_tokens=False)
    state.fill(tokens, [], NEVER)
    found = {tokenizer.decode([token]) for token in allowed(state.masks(tokens, [])[0])}
    assert {" "} < found
    assert found & texts >= {" "}
    assert state.forced(tokens, MAX_FORCED, NEVER) == []


@pytest.mark.parametrize("name", [name for name in CONSTRAINTS if name not in ("max_tokens", "stop")])
def test_masks_allow_all_fitting_tokens_except_other_tokenizations_of_forced_text(grammars, name):
    """A masked token is one after which the text is still sure: its letters are in the one token that is left."""
    rng = random.Random(11)
    state = make_state(grammars, **CONSTRAINTS[name])
    text_of = state.grammar.vocabulary.text
    tokens = []
    for _ in range(30):
        state.fill(tokens, [], NEVER)
        mask = allowed(state.masks(tokens, [])[0])
        plain = allowed(state._plain[()])
        assert set(mask) <= set(plain)
        if mask != plain:
            (only,) = mask
            least = min((text_of(token) for token in plain), key=len)
            assert all(text_of(token).startswith(least) for token in plain)
            other = make_state(grammars, **CONSTRAINTS[name])
            for token in plain:  # each tokenization ends within the remaining token, or after it
                other.fill([*tokens, token], [], NEVER)
                following = [text_of(token) + text_of(more) for more in allowed(other._plain[()])]
                assert all(text[: len(text_of(only))] == text_of(only)[: len(text)] for text in following)
                other = make_state(grammars, **CONSTRAINTS[name])
        tokens.append(rng.choice(mask))
        if tokens[-1] == 0:
            break


CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "f"},
        "parameters": {"type": "array", "items": {"enum": ["abc", "],[", '\\"}]']}, "minItems": 1, "maxItems": 1},
    },
    "required": ["name", "parameters"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("tries", [0, 4])
@pytest.mark.parametrize("max_tokens", [80, 150, 400])
def test_a_list_of_calls_ends_before_its_tokens_do(grammars, tokenizer, max_tokens, tries):
    """A model that always begins another call, whose arguments look like ends of lists."""
    options = {"json": {"type": "array", "items": CALL, "minItems": 1}, "disable_any_whitespace": True}
    for seed in range(4):
        state = make_state(grammars, max_tokens=max_tokens, ends_list=True, **options)
        rng, tokens, text = random.Random(seed), [], ""
        while len(tokens) < max_tokens and tokens[-1:] != [0]:
            if tries:
                state.forced(tokens, tries, NEVER)
            state.fill(tokens, [], NEVER)
            choices = allowed(state.masks(tokens, [])[0])
            commas = [token for token in choices if re.match(r"\]?}?,", tokenizer.decode([token]))]
            tokens.append(rng.choice(commas if text.endswith(("]", "}")) and commas else choices))
            text = tokenizer.decode(tokens)
        assert tokens[-1] == 0
        assert len(json.loads(tokenizer.decode(tokens[:-1]))) >= max_tokens // 50


def test_a_word_longer_than_the_window_is_one_token(grammars, tokenizer):
    long = max((text for text in tokenizer.get_vocab() if text.isascii() and text.isalpha()), key=len)
    spaces = " " * 40
    for text in (f"so {long}{long} ends", f"so{spaces}ends"):
        forced = make_state(grammars, regex=re.escape(text)).forced([], MAX_FORCED, NEVER)
        assert forced == tokenizer.encode(text, add_special_tokens=False)[: len(forced)]
        assert len(forced) >= len(tokenizer.encode(text, add_special_tokens=False)) - 1


ITEM = b'{"name": "f", "parameters": {"a": "x},y\\"}},"}}'


@pytest.mark.parametrize("pieces", [1, 3, 7])
@pytest.mark.parametrize("end", [b"}},", b"},", b","])
def test_an_item_begins_in_any_token(pieces, end):
    """A string may hold a text like an item's end, and a token may end a string and an item and begin the next."""
    whole = b'I think [1, "a"]. [' + ITEM
    before = whole[: len(whole) - len(end) + 1] if end != b"," else whole
    progress = ListProgress()
    tokens = [before[at : at + pieces] for at in range(0, len(before), pieces)]
    assert not any(progress.feed(token) for token in tokens)
    size = -(-len(ITEM) // pieces)
    assert progress.excess([(1, end), (2, b"]"), (3, b" ")], size // 2) == [1]
    assert progress.excess([(1, end)], 2 * size + 9) == []
    inside = ListProgress()
    for token in (b'[{"name"', b': "f", "parameters": {"a": "'):
        inside.feed(token)
    assert inside.excess([(1, b"}},"), (2, b'"}},')], 3) == [2]
