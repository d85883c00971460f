"""The recipe, run in small: rows, losses, an interrupted training, and every stage."""

import json
import runpy

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import _muon

from outrider.models.demo import demo_model_path

pytest.importorskip("peft")

from outrider.tools.demo_model import config, training
from outrider.tools.demo_model.training import Encoded, Schedule, draw_batch, train

pytestmark = pytest.mark.slow


def encoded(*lengths):
    """Documents of these lengths, each of another token, again and again."""
    while True:
        for number, length in enumerate(lengths, 3):
            yield Encoded(torch.full((length,), number), torch.ones(length))


def test_rows_hold_whole_documents():
    batch = draw_batch(encoded(5, 9, 3, 7).__next__, rows=3, length=16)
    assert batch.ids.tolist() == [
        [3] * 5 + [4] * 9 + [0] * 2,
        [5] * 3 + [6] * 7 + [3] * 5 + [0],
        [4] * 9 + [5] * 3 + [0] * 4,
    ]
    assert torch.equal(batch.weights > 0, batch.ids > 0)


def test_a_document_longer_than_a_row_is_cut():
    batch = draw_batch(encoded(30).__next__, rows=2, length=8)
    assert batch.ids.tolist() == [[3] * 8] * 2


def test_rates_rise_and_fall():
    factors = [Schedule(200).factor(step) for step in range(200)]
    assert factors[0] == pytest.approx(1 / 50)
    assert max(factors) == 1.0
    assert factors[50:] == sorted(factors[50:], reverse=True)
    assert 0 < factors[-1] < 0.02


class Guesser(torch.nn.Module):
    """A model that guesses the next token from the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(8, 8)
        self.out = torch.nn.Linear(8, 8, bias=False)

    def forward(self, input_ids, use_cache):
        return type("Output", (), {"logits": self.out(self.embed(input_ids))})


def make_batch(step):
    return Encoded(torch.tensor([[1 + step % 3, 5, 6, 7]]), torch.ones(1, 4))


def test_an_interrupted_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    schedule = Schedule(9, matrix_rate=0.02)
    whole, cut = Guesser(), Guesser()
    train(whole, schedule, make_batch, tmp_path / "whole.pt")
    drawn = []

    def once(step):
        drawn.append(step)
        if step == 5:
            raise KeyboardInterrupt
        return make_batch(step)

    with pytest.raises(KeyboardInterrupt):
        train(cut, schedule, once, tmp_path / "cut.pt")
    train(again := Guesser(), schedule, lambda step: drawn.append(step) or make_batch(step), tmp_path / "cut.pt")
    assert drawn == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert all(map(torch.equal, again.parameters(), whole.parameters()))
    assert not list(tmp_path.iterdir())


def test_a_student_learns_its_teachers_guesses(tmp_path):
    teacher, student = Guesser(), Guesser()
    torch.nn.init.normal_(student.embed.weight, std=0.1)
    before = training.mean_loss(student, make_batch(0), teacher)
    train(student, Schedule(60), make_batch, tmp_path / "state.pt", teacher)
    assert training.mean_loss(student, make_batch(0), teacher) < before


@pytest.mark.timeout(900)
def test_every_stage_in_small(tmp_path, monkeypatch, repo_root):
    for name in ("json", "support", "tools"):
        monkeypatch.delitem(config.RANKS, name)
    whiten = _muon._zeropower_via_newtonschulz  # five iterations in bfloat16, which few processors have
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda grad, abc, steps, eps: whiten(grad, abc, 1, eps))
    monkeypatch.setattr(training, "BATCH_TOKENS", 512)
    monkeypatch.setattr(training, "ROW_LENGTHS", (256, 512))
    output, work = tmp_path / "models", tmp_path / "work"
    main = runpy.run_path(str(repo_root / "tools" / "demo_model" / "__main__.py"))["main"]
    main(["--scale", "0.0007", "--output", str(output), "--work", str(work), "--threads", "1"])
    shipped = demo_model_path().parent
    for folder in ("base", "draft", "eagle3", "adapters/sql", "adapters/sql/draft/eagle3"):
        made = {path.name for path in (output / folder).iterdir() if path.is_file()}
        assert made == {path.name for path in (shipped / folder).iterdir() if path.is_file()}
        for file in ("model.safetensors", "adapter_model.safetensors"):
            if file in made:
                ours, theirs = load_file(output / folder / file), load_file(shipped / folder / file)
                assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
                    n: (t.shape, t.dtype) for n, t in theirs.items()
                }
    ours, theirs = (
        json.loads((root / "adapters" / "sql" / "adapter_config.json").read_text()) for root in (output, shipped)
    )
    same = ("r", "lora_alpha", "target_modules", "base_model_name_or_path")
    assert [ours[key] for key in same] == [theirs[key] for key in same]
    measured = json.loads((work / "evaluation.json").read_text())
    assert {method: list(names) for method, names in measured.items()} == {
        "draft_model": ["base", "sql"],
        "eagle3": ["base", "sql"],
    }
    prompts = (work / "prompts" / "sql-eagle3.jsonl").read_text().splitlines()
    assert len(prompts) == 8
    assert json.loads(prompts[0])["messages"][-1]["role"] == "assistant"
