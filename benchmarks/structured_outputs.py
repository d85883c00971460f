"""Structured outputs: whether answers have their form, what masks cost, and what tokens without a choice gain.

    python benchmarks/structured_outputs.py --model PATH [--output FILE.json] [--answers 2000] [--suite FOLDER]

Answers are sampled at temperature 1 under 50 schemas of this file, and under those of JSON Schema's test suite that
are served (`--suite`: its folder `tests/draft2020-12`), 32 requests at a time. A bias makes tokens that close a text, a
list or an object more likely, so that answers end. `cut`: answers that reached `max_tokens` all the same; others are
sampled in their place.
Cost and gain are ratios of output tokens a second, in turn: with a form over none, at 8 requests; without one, after
grammars were used over before; and with tokens without a choice proposed over not, at 1 and 4 requests. `--rounds 0`
leaves them out, `--answers 0` the answers. Needs the package jsonschema.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from script import in_turn, make_parser, ratio_of, settings_of, write_result

from outrider import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from outrider.platform.core.constraint_check import CHECKER

WORDS = "name city color price owner status notes level code count".split()
MAX_TOKENS = 1000
CLOSING_BIAS = 4.0
"""Added to the logits of tokens that begin with `"`, `]` or `}`, and of the end's token."""
FORMS = {
    "any text": StructuredOutputsParams(regex=r"(?s).*"),
    "array": StructuredOutputsParams(json={"type": "array", "items": {"type": "string"}, "minItems": 40}),
}
ORDERS = [
    "Anna from Lisbon ordered 3 green lamps for 42 euros.",
    "Bob from Paris bought 12 red cups and paid 30 euros.",
    "Carla lives in Rome; she wants 2 blue chairs, 99 euros.",
    "For 15 euros Dan of Oslo got one green pen.",
]


def _closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


ORDER = _closed(
    {
        "customer_name": {"type": "string", "maxLength": 20},
        "customer_city": {"type": "string", "maxLength": 20},
        "order_quantity": {"type": "integer", "maximum": 99},
        "order_item": {"type": "string", "maxLength": 20},
        "item_color": {"enum": ["red", "green", "blue"]},
        "total_price_in_euros": {"type": "number"},
    }
)


def own_schemas() -> list[dict[str, Any]]:
    """Fifty schemas: ten of each of five shapes."""
    text = {"type": "string", "maxLength": 12}
    found: list[dict[str, Any]] = []
    for index, word in enumerate(WORDS):
        number = {"type": "integer", "minimum": -index, "maximum": 10 * index + 9}
        choice = {"enum": [*WORDS[index : index + 3], index, None, True]}
        found += [
            _closed({word: text, "n": number, "kind": choice}, [word]),
            {"type": "array", "items": number, "minItems": index % 3, "maxItems": 3 + index % 4},
            _closed({"a": {"anyOf": [number, text, {"type": "null"}]}, "b": {"type": "boolean"}}),
            _closed({word: {"type": "string", "pattern": f"^[a-z]{{{index + 1},{index + 4}}}-[0-9]{{2}}$"}}),
            {
                "$defs": {
                    "node": _closed({"v": number, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
                },
                "$ref": "#/$defs/node",
            },
        ]
    return found


def suite_schemas(folder: Path) -> Iterator[dict[str, Any]]:
    """Schemas of the test suite that are served, each once. Those with \\p{...} are left out: the validator reads
    patterns with Python's `re`, which knows no such thing."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if isinstance(schema, dict) and "\\p{" not in json.dumps(schema):
                try:
                    ignored = CHECKER.check(StructuredOutputsParams(json=schema))
                except InvalidRequestError:
                    continue
                if not ignored:
                    yield schema


def validity(llm: LLM, schemas: list[dict[str, Any]], num_answers: int, asked: int = 0) -> dict[str, Any]:
    """Sample answers, schema by schema in turn, until the wanted number is complete, and validate these.

    `asked`: number of answers that were sampled before; a seed each.
    """
    tokenizer = llm.get_tokenizer()
    texts = (tokenizer.decode([token]).lstrip() for token in range(len(tokenizer)))
    bias = {token: CLOSING_BIAS for token, text in enumerate(texts) if text.startswith(('"', "]", "}"))}
    bias[tokenizer.eos_token_id] = CLOSING_BIAS
    counts, found, num_tokens = {"valid": 0, "invalid": 0, "cut": 0}, set(), 0
    while (missing := num_answers - counts["valid"] - counts["invalid"]) and counts["cut"] < num_answers:
        chosen = [(index, schemas[index % len(schemas)]) for index in range(asked, asked + missing)]
        asked += missing
        fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "logit_bias": bias}
        params = [
            SamplingParams(seed=index, structured_outputs=StructuredOutputsParams(json=schema), **fields)
            for index, schema in chosen
        ]
        prompts = [f"A short JSON document of the schema {json.dumps(schema)[:200]}:\n" for _, schema in chosen]
        for (_, schema), output in zip(chosen, llm.generate(prompts, params), strict=True):
            answer = output.outputs[0]
            num_tokens += len(answer.token_ids)
            if answer.finish_reason == "length":
                counts["cut"] += 1
                continue
            found.add(answer.text)
            is_valid = Draft202012Validator(schema).is_valid(json.loads(answer.text))
            counts["valid" if is_valid else "invalid"] += 1
            if not is_valid:
                print("INVALID", json.dumps(schema), answer.text, flush=True)
    return {"schemas": len(schemas), **counts, "different answers": len(found), "tokens": num_tokens}


def speed(llm: LLM, num_requests: int, params: SamplingParams) -> float:
    """Output tokens a second of some orders."""
    messages = [
        [{"role": "user", "content": f"Extract the order as JSON: {ORDERS[i % len(ORDERS)]}"}]
        for i in range(num_requests)
    ]
    start = time.perf_counter()
    outputs = llm.chat(messages, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def speeds(llm: LLM, rounds: int) -> dict[str, Any]:
    """Cost of masks, and gain of tokens without a choice."""
    free: dict[str, Any] = {"temperature": 0, "max_tokens": 96, "ignore_eos": True, "speculative": False}
    none = partial(speed, llm, 8, SamplingParams(**free))
    before = in_turn({"none": none}, rounds)["none"]
    works = {
        name: partial(speed, llm, 8, SamplingParams(**free, structured_outputs=form)) for name, form in FORMS.items()
    }
    found = in_turn(works | {"none": none}, rounds)
    result: dict[str, Any] = {f"{name} over none at 8": ratio_of(found[name], found["none"]) for name in FORMS}
    result["none, after grammars over before"] = ratio_of(found["none"], before)
    for count in (1, 4):
        for name, compact in (("", False), (", no whitespace", True)):
            form = StructuredOutputsParams(json=ORDER, disable_any_whitespace=compact)
            order = {"temperature": 0, "max_tokens": 160, "structured_outputs": form}
            works = {
                kind: partial(speed, llm, count, SamplingParams(**order, speculative=speculative))
                for kind, speculative in (("forced", None), ("off", False))
            }
            found = in_turn(works, rounds)
            result[f"forced tokens at {count}{name}"] = ratio_of(found["forced"], found["off"])
    return result


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = make_parser(__doc__, rounds=5, model=True)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--suite", type=Path, help="folder with files of JSON Schema's test suite")
    options: argparse.Namespace = parser.parse_args(arguments)
    result: dict[str, Any] = {"settings": settings_of(options) | {"suite": options.suite is not None}}
    with LLM(options.model, max_model_len=1536, max_num_seqs=32) as llm:
        if options.rounds:
            result |= speeds(llm, options.rounds)
            print(json.dumps(result, indent=1), flush=True)
        if options.answers:
            schemas = own_schemas() + (list(suite_schemas(options.suite)) if options.suite else [])
            result["validity"] = validity(llm, schemas, options.answers)
            print(json.dumps(result["validity"]), flush=True)
    write_result(options.output_json, "structured outputs", "structured outputs", result)


if __name__ == "__main__":
    main()
