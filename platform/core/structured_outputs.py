"""Constraints on the form of an answer: JSON, a regular expression, choices, a grammar. The names are vLLM's.

The package `llguidance` computes token masks for them. This module has the request's constraint and its text for that
package; `platform/engine/sampling/grammars.py` follows it token by token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from .compat.unsupported_options import accepts_unsupported_options
from .compat.vllm_python import STRUCTURED
from .errors import InvalidRequestError
from .json_schema import served
from .json_schema.document import Probe
from .text import did_you_mean

MAX_CONSTRAINT_CHARS = 65_536
"""Characters of a constraint: a schema as JSON, a grammar, all choices. Checking this number takes about 0.1 s."""
MAX_CHOICES = 1024
WHITESPACE = r"[ ]|\n[ \t]{0,40}"
"""Whitespace between the parts of JSON: a model that may write any amount of it sometimes writes nothing else."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Tokens of a text without a choice are chosen by `grammar_state.py`: the package would tokenize all of that text for
each mask, 60 ms for 150,000 characters."""
MAX_LEXER_STATES = 16_384
"""Most states of a grammar's lexer, 5 to 16 MB; then it starts again. A text of bounded length needs one a
character."""
_STACK_BYTES = 1 << 28
"""Stack of a thread that compiles: `llguidance` recurses for nested rules, and 65,536 characters can nest deeper than a
usual stack of 8 MiB. Only used pages take memory."""
_stack_size = threading.Lock()
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NO_PACKAGE = "structured outputs need the package llguidance: pip install 'outrider[structured]'"


@accepts_unsupported_options(STRUCTURED)
@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """Constraint on an answer; exactly one kind is given.

    Raises:
        InvalidRequestError: a field is wrong; `param` is `source`.
    """

    json: str | dict[str, Any] | bool | None = None
    """JSON schema, as text or as an object; kept as text."""
    regex: str | None = None
    """Regular expression for the whole answer, in the syntax of Rust's crate regex: without look-around."""
    choice: list[str] | None = None
    """Texts of which one is the answer; at most 1,024."""
    grammar: str | None = None
    """Grammar in Lark's or GBNF's syntax."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}: free text, in which each trigger begins one of
    the structures; kept as text."""
    disable_any_whitespace: bool = False
    """True: JSON has ", " and ": " between its parts and no other whitespace."""
    disable_additional_properties: bool = False
    """True: objects of the schema have only the properties that it names, unless it specifies otherwise."""
    whitespace_pattern: str | None = None
    """Regular expression for the whitespace between two parts of JSON, if there is any; by default one space, or a
    line's end with up to 40 spaces or tabs."""
    source: str = "structured_outputs"
    """The request's field, which errors name."""
    frame: str | None = None
    """Grammar in Lark's syntax in which `@body` is the constraint; only the chat API sets it."""
    ignored: tuple[str, ...] = ()
    """Paths of keywords that the chat API left out of `grammar` or `frame`."""
    ends_list: bool = False
    """True: the list of calls ends when the tokens left cannot hold another; only the chat API sets it."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            self.json_object = None
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise self._wrong(f"needs exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}")
        for kind in ("json", "structural_tag"):
            value = getattr(self, kind)
            if isinstance(value, (dict, bool)):
                try:
                    setattr(self, kind, json.dumps(value, ensure_ascii=False))
                except (TypeError, ValueError, RecursionError) as error:
                    raise self._wrong(f"{kind} is not JSON: {error}") from error
        for kind in ("json", "regex", "grammar", "structural_tag", "whitespace_pattern", "frame"):
            value = getattr(self, kind)
            if value is not None:
                self._check_text(kind, value)
        if self.choice is not None:
            self._check_choice()

    def _check_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, list | tuple) or not choice or not all(isinstance(text, str) for text in choice):
            raise self._wrong("choice must be a list of texts, and not empty")
        if len(choice) > MAX_CHOICES:
            raise self._wrong(f"choice has {len(choice)} entries; at most {MAX_CHOICES} are allowed")
        for text in choice:
            self._check_text("choice", text)
        self._check_length("choice", sum(map(len, choice)))
        self.choice = list(choice)

    def _check_text(self, kind: str, value: object) -> None:
        if not isinstance(value, str):
            raise self._wrong(f"{kind} must be a text, got {type(value).__name__}")
        self._check_length(kind, len(value))
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self._wrong(f"{kind} is not valid Unicode text: {error.reason}") from error

    def _check_length(self, kind: str, length: int) -> None:
        if length > MAX_CONSTRAINT_CHARS:
            raise self._wrong(f"{kind} has {length} characters; at most {MAX_CONSTRAINT_CHARS} are allowed")

    def _wrong(self, problem: str) -> InvalidRequestError:
        return _wrong(self.source, problem)

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the constraint: two with the same key allow the same answers."""
        options = self.disable_any_whitespace, self.disable_additional_properties, self.whitespace_pattern, self.frame
        return (*(getattr(self, kind) for kind in _KINDS if kind != "choice"), tuple(self.choice or ()), *options)

    def grammar_text(self) -> str:
        """Grammar in the form of `llguidance`.

        Raises:
            InvalidRequestError: a text is not of its syntax, or the package is not installed.
        """
        return self.compile()[0]

    def compile(self) -> tuple[str, list[str]]:
        """Grammar in the form of `llguidance`, and the paths of the schema's keywords that it leaves out, such as
        "response_format.properties.tags.uniqueItems"; errors as of `grammar_text`."""
        package = grammar_package()
        ignored: list[str] = []
        try:
            text = self._grammar_text(package, ignored)
            named = dict.fromkeys([f"{self.source}.{place}" for place in ignored] + list(self.ignored))
            return self._framed(text), list(named)
        except InvalidRequestError:
            raise
        except (ValueError, KeyError, TypeError, AssertionError, AttributeError, RecursionError) as error:
            kind = next(kind for kind in _KINDS if getattr(self, kind) is not None)
            raise self._wrong(f"{kind}: {_shortened(str(error) or type(error).__name__)}") from error

    def _grammar_text(self, package: Any, ignored: list[str]) -> str:
        """The grammar without its frame; keywords that are left out are added to `ignored`."""
        matcher = package.LLMatcher
        if self.json is not None or self.json_object:
            schema, places = served(str(self.json or '{"type": "object"}'), _probe(package))
            ignored += places
            schema = {} if schema is True else schema
            if not isinstance(schema, dict):
                raise self._wrong("json must be a JSON schema that allows anything")
            if self.disable_additional_properties:
                schema = _closed(schema)
            return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=self._json_options()))
        if self.regex is not None:
            return str(matcher.grammar_from_regex(self.regex))
        if self.choice is not None:
            texts = " | ".join(json.dumps(text) for text in self.choice)
            return str(matcher.grammar_from_lark(f"start: {texts}"))
        if self.grammar is not None:
            return str(package.grammar_from("grammar", self.grammar))
        return str(matcher.grammar_from_lark(self._tags(package, ignored)))

    def _framed(self, text: str) -> str:
        """Grammar with the options of all constraints, whose part `body` is another one if there is a frame."""
        grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        first = grammars[0]
        if self.frame is not None or not first.get("lark_grammar"):
            first["name"] = "body"
            first = {"lark_grammar": self.frame or "start: @body"}
            grammars.insert(0, first)
        first["lark_grammar"] = f"{_OPTIONS}\n{first['lark_grammar']}"
        return json.dumps({"grammars": grammars})

    def _tags(self, package: Any, ignored: list[str]) -> str:
        """Lark grammar of the structural tag; keywords that are left out are added to `ignored`."""
        tag = json.loads(str(self.structural_tag))
        structures, triggers = tag.get("structures"), tag.get("triggers")
        if not structures or not triggers:
            raise self._wrong('structural_tag needs "structures" and "triggers"; other forms of it are not served')
        tags = []
        for structure in structures:
            begin, end, schema = structure["begin"], structure["end"], structure["schema"]
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise self._wrong(f"structural_tag: no trigger begins {begin!r}")
            if isinstance(schema, dict):
                schema, places = served(json.dumps(schema), _probe(package))
                ignored += places
                schema |= {"x-guidance": self._json_options()}
            tags.append(package.StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
        return str(package.StructTag.to_grammar(tags, assume_special=False))

    def _json_options(self) -> dict[str, Any]:
        if self.whitespace_pattern is not None:
            return {"whitespace_pattern": self.whitespace_pattern}
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return {"whitespace_pattern": WHITESPACE}


def on_deep_stack(work: Callable[[], Any], *, source: str) -> Any:
    """Result of `work`, which compiles a constraint, in a thread with a stack for any grammar of its length.

    Raises:
        InvalidRequestError: `llguidance` gave up; it names `source`.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # also a panic of the package, which is no Exception
            failure = _wrong(source, _shortened(str(error) or type(error).__name__))
            failure.__cause__ = error
            result.set_exception(failure)

    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()


def parser_limits() -> Any:
    """Limits of `llguidance`: a grammar beyond them is an error instead of a long wait."""
    return grammar_package().LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=50_000,  # 4 ms for a row of logits
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def parse(value: Any, source: str = "structured_outputs") -> StructuredOutputsParams:
    """Constraint of a mapping with the fields above; `source` is its name in errors.

    Raises:
        InvalidRequestError: it is none, or has an unknown field.
    """
    if not isinstance(value, dict):
        raise _wrong(source, "must be an object")
    known = StructuredOutputsParams.__dataclass_fields__.keys() - {"source", "frame", "ignored", "ends_list"}
    for name in value:
        if name not in known:
            raise _wrong(source, f"has no field {str(name)[:100]!r}{did_you_mean(str(name), known)}")
    given = {name: field for name, field in value.items() if field is not None}
    return StructuredOutputsParams(**{**given, "source": source})


def grammar_package() -> Any:
    """The package that makes masks.

    Raises:
        InvalidRequestError: it is not installed.
    """
    if find_spec("llguidance") is None:
        raise InvalidRequestError(_NO_PACKAGE, param="structured_outputs")
    import llguidance

    return llguidance


def _probe(package: Any) -> Probe:
    """See `Probe`."""

    def problem_of(schema: dict[str, Any]) -> str:
        text = package.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        matcher = package.LLMatcher(package.LLTokenizer("byte"), text, log_level=0, limits=parser_limits())
        if matcher.is_error() or schema["type"] != "object":
            return str(matcher.get_error())
        matcher.consume_tokens(list(b'{"'))
        return "" if any(matcher.compute_bitmask()) and not matcher.is_error() else "no property can follow"

    return problem_of


def _wrong(source: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{source}: {problem}", param=source)


def _shortened(text: str) -> str:
    return text if len(text) <= 500 else text[:500] + "..."


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties` false for objects with properties that do not specify it."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: value if name in ("enum", "const", "default") else _closed(value) for name, value in schema.items()}
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
