"""`outrider bench speculation --modes medusa`: heads for the demo model, in the public format."""

import json

import pytest
import torch
from torch.nn import functional as F

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.speculation.tasks import make_tasks
from outrider.platform.cli.main import main

pytestmark = pytest.mark.slow

NUM_HEADS = 3
QUICK = "bench speculation --modes medusa --tasks base --batch-sizes 1 --rounds 1 --max-tokens 12 --dtype float32"


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """They know the demo's answers to its prompts: linear maps that fit its texts best (ridge regression)."""
    from transformers import LlamaForCausalLM

    folder = demo_model_path()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts, states = [], []
    (task,) = make_tasks(load_tokenizer(folder), {}, None, ["base"])
    with torch.inference_mode():
        for prompt in task.prompts:
            texts.append(model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0])
            states.append(model.model(texts[-1][None]).last_hidden_state[0])
    size, weights = model.config.hidden_size, {}
    for head in range(NUM_HEADS):
        features = torch.cat([state[: -head - 2] for state in states])
        labels = F.one_hot(torch.cat([text[head + 2 :] for text in texts]), model.config.vocab_size).float()
        fitted = torch.linalg.solve(features.T @ features + torch.eye(size), features.T @ labels).T
        weights |= {f"{head}.0.linear.weight": torch.zeros(size, size), f"{head}.1.weight": fitted.contiguous()}
    path = tmp_path_factory.mktemp("medusa")
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}))
    torch.save(weights, path / "medusa_lm_head.pt")
    return path


def test_heads_are_measured_and_the_text_is_offs(heads, tmp_path, capsys):
    out = tmp_path / "a.json"
    more = f"--medusa {heads} --num-speculative-tokens {NUM_HEADS} --output-json {out}"
    assert main([*QUICK.split(), *more.split()]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["off", "medusa"]
    row = rows[1]
    assert row["same_text_as_off"]["same"] == row["same_text_as_off"]["of"] > 0
    shares = row["acceptance_per_position"]
    assert len(shares) == NUM_HEADS
    assert min(shares) > 0.4, "every head guesses with its own weights"
    assert shares == sorted(shares, reverse=True)
    assert 1 + sum(shares) == pytest.approx(row["acceptance_length"], abs=1e-3)
    assert set(row["drafts_verified"]) <= {str(number) for number in range(NUM_HEADS + 1)}
    assert "medusa" in capsys.readouterr().out


def test_more_drafts_than_heads_are_refused(heads, capsys):
    assert main([*QUICK.split(), "--medusa", str(heads), "--num-speculative-tokens", "4"]) == 1
    error = capsys.readouterr().err
    assert "num_speculative_tokens is 4" in error
    assert f"{NUM_HEADS} Medusa heads" in error
