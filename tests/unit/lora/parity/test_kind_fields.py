"""Every kind of adapter but LoRA: PEFT's logits for each field of its configuration, or a refusal that names it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from outrider.lora.files.kinds import KINDS, field_rules
from outrider.platform.core.errors import AdapterError

from ..conftest import KIND_STATES
from .kinds import KIND_CASES
from .reference import VOCAB, Engine, peft_logits, save_base

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("kinds") / "base", "Qwen2", False)


def write_config(folder, **values):
    """Change fields of an adapter's configuration."""
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_every_kind_has_cases():
    assert set(KIND_CASES) == set(KIND_STATES) == KINDS.keys() - {"LORA"}


@pytest.mark.parametrize("kind", KIND_CASES)
def test_the_rules_have_every_field_of_peft_and_every_field_is_driven(kind):
    cases, rules = KIND_CASES[kind], field_rules(KINDS[kind])
    assert set(rules) == {field.name for field in dataclasses.fields(cases.config)}
    assert set(cases.refused) == {name for name, rule in rules.items() if rule.refused}
    assert set(rules) == {name.split()[0] for name in (*cases.served, *cases.written, *cases.refused)}


@pytest.mark.parametrize("kind", KIND_CASES)
def test_served_values_give_the_logits_of_peft(base, tmp_path, kind):
    cases = KIND_CASES[kind]
    paths = {name.replace(" ", "_"): str(tmp_path / name.replace(" ", "_")) for name in cases.served}
    for seed, (path, options) in enumerate(zip(paths.values(), cases.served.values(), strict=True)):
        cases.train(base, seed, **cases.plain | options).save_pretrained(path)
    for field, value in cases.written.items():
        paths[field] = str(tmp_path / field)
        cases.train(base, 0, **cases.plain).save_pretrained(paths[field])
        write_config(paths[field], **{field: value})
    prompts = {name: torch.randint(3, VOCAB, (9,)).tolist() for name in ("base", *paths)}
    prompts |= {name: [3, 9, *prompt] for name, prompt in prompts.items()}
    engine = Engine(base, paths, prompts, max_loras=len(prompts))
    engine.admit(prompts)
    got = engine.run(prompts, (5, 2))
    engine.close()
    for name, prompt in prompts.items():
        expected = peft_logits(base, paths.get(name), prompt)
        torch.testing.assert_close(got[name], expected, atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        assert name == "base" or (expected - peft_logits(base, None, prompt)).abs().max() > 0.05, name


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in KIND_CASES for field in KIND_CASES[kind].refused]
)
def test_refused_values_are_refused_by_the_name_of_the_field(base, tmp_path, kind, field):
    cases = KIND_CASES[kind]
    cases.train(base, 0, **cases.plain).save_pretrained(tmp_path / "x")
    write_config(tmp_path / "x", **{field: cases.refused[field]})
    engine = Engine(base, {"x": str(tmp_path / "x")}, {"x": [3, 4]})
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: {field}=.* is not served"):
        engine.admit(["x"])
    engine.close()
