"""Answers under grammars with every attribute: drafts, adapters and masks that come late do not change their tokens."""

from __future__ import annotations

import json
import random

import pytest

from outrider import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.engine.sampling.mask_threads import MaskThreads
from outrider.spec_decode.training.data import Sample
from outrider.spec_decode.training.options import TrainOptions
from outrider.spec_decode.training.run import train_draft

PROMPTS = ["Anna from Lisbon ordered 3 green lamps for 42 euros.", "SELECT name FROM", "a b c a b c a b"]
DRAFTERS = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False},
    "adaptive": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "model": str(demo_model_path().parent / "draft")},
    "eagle3": {"method": "eagle3", "model": str(demo_model_path().parent / "eagle3"), "num_speculative_tokens": 3},
}
TRAINED = ["eagle", "medusa"]
"""Methods without a head among the demo's files."""
ATTRIBUTES = [
    *("", "[lazy]", "[max_tokens=3]", '[stop=";"]', '[suffix=";"]', "[temperature=0.7]", "[capture]"),
    *('[stop=";", stop_capture="end"]', '[suffix=";", max_tokens=5]', '[capture="c", lazy]', "[max_tokens=4, lazy]"),
]
REGEXES = ["[a-z]+", "[a-c ]{2,9}", "(lamp|green){1,3}", "[0-9]{1,4}", r"\p{L}{1,20}", "Anna( [A-Z][a-z]{1,5})?"]


def grammar(rng: random.Random) -> str:
    """Rules with attributes, some of which the package cannot take back."""
    names = [f"r{index}" for index in range(rng.randint(1, 3))]
    marks, ends = ["; ", "= ", "name: "], ["", '"!"', "start?"]
    parts = [name if rng.random() < 0.5 else f'"{rng.choice(marks)}" {name}' for name in names]
    rules = [f"{name}{rng.choice(ATTRIBUTES)}: /{rng.choice(REGEXES)}/" for name in names]
    return "\n".join([f"start: {' '.join(parts)} {rng.choice(ends)}", *rules])


def schema(rng: random.Random, depth: int = 2) -> dict:
    kinds = ["string", "integer", "boolean", "enum"] + ["object", "array"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "object":
        names = rng.sample(["name", "city", "a rather long name", "n"], rng.randint(1, 3))
        properties = {name: schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth - 1), "maxItems": 2}
    if kind == "enum":
        return {"enum": ["green lamp", "green lamps", 7]}
    return {"type": kind, **({"maxLength": 9} if kind == "string" else {})}


def constraint(rng: random.Random) -> dict:
    kind = rng.choice(["grammar", "grammar", "json", "regex", "choice"])
    if kind == "grammar":
        return {"grammar": grammar(rng)}
    if kind == "json":
        return {"json": schema(rng), "disable_any_whitespace": True}
    if kind == "regex":
        return {"regex": f"{rng.choice(REGEXES)} and {rng.choice(REGEXES)}"}
    return {"choice": ["yes indeed", "yes", "not at all"]}


def requests():
    rng = random.Random(7)
    prompts, params, adapters = [], [], []
    for index in range(24):
        sampling = {"temperature": 0} if index % 2 else {"temperature": 0.8, "seed": index}
        outputs = StructuredOutputsParams(**constraint(rng))
        params.append(SamplingParams(max_tokens=24, structured_outputs=outputs, **sampling))
        prompts.append(rng.choice(PROMPTS))
        adapters.append(rng.choice([None, "json", "sql"]))
    return prompts, params, adapters


EXPECTED: dict[str, list] = {}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """head(method) -> the `speculative_config` with a head for the demo, trained for some steps on the prompts."""
    made: dict[str, dict] = {}

    def head(method):
        if method not in made:
            folder = tmp_path_factory.mktemp(method)
            samples = [Sample(load_tokenizer(demo_model_path()).encode(text * 4), 1) for text in PROMPTS]
            fields = {"steps": 20, "lr": 1e-3, "eval_every": 1000, "batch_tokens": 512, "progress": False}
            model = str(demo_model_path())
            options = TrainOptions(method=method, model=model, data="", output=str(folder), dtype="float32", **fields)
            train_draft(options, samples, samples[:1])
            made[method] = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
        return made[method]

    return head


def late_at_random(monkeypatch, share: float) -> None:
    """Some jobs do not run in a step, as if the threads had no time for them."""
    rng, run = random.Random(3), MaskThreads.run
    monkeypatch.setattr(
        MaskThreads, "run", lambda self, jobs, _: run(self, [job for job in jobs if rng.random() > share], 30.0)
    )


@pytest.mark.parametrize(
    ("drafter", "share"),
    [*((name, 0.0) for name in ("off", "ngram", "eagle3")), *((name, 0.4) for name in (*DRAFTERS, *TRAINED))],
)
def test_drafts_and_late_masks_change_no_token(monkeypatch, head, drafter, share):
    speculative = head(drafter) if drafter in TRAINED else DRAFTERS[drafter]
    late_at_random(monkeypatch, share)
    with LLM(
        str(demo_model_path()),
        dtype="float32",
        max_model_len=256,
        enable_lora=True,
        max_lora_rank=32,
        speculative_config=speculative,
    ) as llm:
        for name in ("json", "sql"):
            llm.load_lora_adapter(LoRARequest(name, path=str(demo_adapters()[name])))
        prompts, params, adapters = requests()
        outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    found = [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]
    for index, (one, other) in enumerate(zip(found, EXPECTED.setdefault("tokens", found), strict=True)):
        assert one == other, (index, params[index].structured_outputs)


@pytest.mark.parametrize("attribute", ["max_tokens=4", 'stop=";"'])
def test_irreversible_attributes_work_with_drafts(attribute):
    text = f'start: "name: " word "!"\nword[{attribute}]: /[a-z]+/'
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputsParams(grammar=text))
    texts = []
    for drafter in ("off", "ngram"):
        with LLM(max_model_len=256, speculative_config=DRAFTERS[drafter]) as llm:
            texts.append(llm.generate("name: lamp! name: lamp!", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert texts[0].startswith("name: ")


def test_logprobs_and_many_answers_with_late_masks(monkeypatch):
    results = []
    for share in (0.0, 0.5):
        with monkeypatch.context() as patch, LLM(max_model_len=256, speculative_config=None) as llm:
            late_at_random(patch, share)
            outputs = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "maxItems": 4})
            params = SamplingParams(
                n=4, temperature=1.0, seed=1, max_tokens=20, logprobs=1, prompt_logprobs=1, structured_outputs=outputs
            )
            output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
            results.append([(choice.text, len(choice.logprobs)) for choice in output.outputs])
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert results[0] == results[1]
    assert all(json.loads(text) is not None for text, count in results[0] if count < 20)
