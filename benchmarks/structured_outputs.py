"""Structured outputs: whether answers have their form, what masks cost, and what tokens without a choice gain.

    python benchmarks/structured_outputs.py --model PATH [--output FILE.json] [--answers 2000] [--suite FOLDER]

Answers are sampled at temperature 1 under 50 schemas of this file, and under those of JSON Schema's test suite that are
served (`--suite`: its folder `tests/draft2020-12`), 32 requests at a time. `cut`: answers that reached `max_tokens`.
Cost and gain are ratios of output tokens a second, in turn: with a form that allows any text over none, at 8 requests;
and with tokens without a choice proposed over not, at 1 and 4 requests. Needs the package jsonschema.
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
MAX_TOKENS = 400
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
                    CHECKER.check(StructuredOutputsParams(json=schema))
                except InvalidRequestError:
                    continue
                yield schema


def validity(llm: LLM, schemas: list[dict[str, Any]], num_answers: int) -> dict[str, Any]:
    """Sample answers, schema by schema in turn, and validate them."""
    chosen = [schemas[index % len(schemas)] for index in range(num_answers)]
    params = [
        SamplingParams(
            temperature=1.0, seed=index, max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputsParams(json=schema)
        )
        for index, schema in enumerate(chosen)
    ]
    prompts = [f"A short JSON document of the schema {json.dumps(schema)[:400]}:\n" for schema in chosen]
    counts = {"valid": 0, "cut": 0, "invalid": 0}
    for schema, output in zip(chosen, llm.generate(prompts, params), strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            counts["cut"] += 1
            continue
        is_valid = Draft202012Validator(schema).is_valid(json.loads(answer.text))
        counts["valid" if is_valid else "invalid"] += 1
        if not is_valid:
            print("INVALID", json.dumps(schema), answer.text, flush=True)
    return {"schemas": len(schemas), **counts}


def speed(llm: LLM, num_requests: int, params: SamplingParams) -> float:
    """Output tokens a second of some orders."""
    messages = [
        [{"role": "user", "content": f"Extract the order as JSON: {ORDERS[i % len(ORDERS)]}"}]
        for i in range(num_requests)
    ]
    start = time.perf_counter()
    outputs = llm.chat(messages, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = make_parser(__doc__, rounds=5, model=True)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--suite", type=Path, help="folder with files of JSON Schema's test suite")
    options: argparse.Namespace = parser.parse_args(arguments)
    result: dict[str, Any] = {"settings": settings_of(options) | {"suite": options.suite is not None}}
    with LLM(options.model, max_model_len=1024, max_num_seqs=32) as llm:
        free = {"temperature": 0, "max_tokens": 96, "ignore_eos": True, "speculative": False}
        any_text = StructuredOutputsParams(regex=r"(?s).*")
        works = {
            "form": partial(speed, llm, 8, SamplingParams(**free, structured_outputs=any_text)),
            "none": partial(speed, llm, 8, SamplingParams(**free)),
        }
        found = in_turn(works, options.rounds)
        result["cost"] = ratio_of(found["form"], found["none"])
        for count in (1, 4):
            order = {"temperature": 0, "max_tokens": 160, "structured_outputs": StructuredOutputsParams(json=ORDER)}
            works = {
                name: partial(speed, llm, count, SamplingParams(**order, speculative=speculative))
                for name, speculative in (("forced", None), ("off", False))
            }
            found = in_turn(works, options.rounds)
            result[f"forced tokens at {count}"] = ratio_of(found["forced"], found["off"])
        print(json.dumps(result, indent=1), flush=True)
        schemas = own_schemas() + (list(suite_schemas(options.suite)) if options.suite else [])
        result["validity"] = validity(llm, schemas, options.answers)
    print(json.dumps(result["validity"]), flush=True)
    write_result(options.output_json, "structured outputs", "structured outputs", result)


if __name__ == "__main__":
    main()
