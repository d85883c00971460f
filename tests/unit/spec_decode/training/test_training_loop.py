"""The loop: acceptance as in a verification, resuming to the same result, Ctrl-C, refusals."""

import dataclasses
import json
import os
import re
import signal
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from outrider.platform.core.errors import InvalidRequestError, OutriderError
from outrider.spec_decode.training import run as run_module
from outrider.spec_decode.training import target as target_module
from outrider.spec_decode.training.data import plan_batches
from outrider.spec_decode.training.measurement import count_rounds, summarize
from outrider.spec_decode.training.methods.eagle_head import Eagle3Head
from outrider.spec_decode.training.run import train_draft
from outrider.spec_decode.training.target import Target, choose_aux_layers, import_peft
from outrider.spec_decode.training.trainer import rate_factor

from .counting import counting_samples, save_counting_target


@given(st.data(), st.integers(1, 5))
def test_rounds_are_those_of_a_verification(data, k):
    """Against a verification that walks token by token: the drafter drafts again after every wrong token."""
    text = data.draw(st.lists(st.integers(0, 2), min_size=0, max_size=12))
    guesses = data.draw(
        st.lists(st.lists(st.integers(0, 2), min_size=k, max_size=k), min_size=len(text), max_size=len(text))
    )
    expected, at = [], 1
    while at < len(text):
        accepted = 0
        while accepted < k and at + accepted < len(text) and guesses[at + accepted][accepted] == text[at + accepted]:
            accepted += 1
        expected.append(accepted)
        at += accepted + 1
    hits = [[guess == token for guess in row] for row, token in zip(guesses, text, strict=True)]
    assert count_rounds(hits, k) == expected


def test_summary():
    measured = summarize(1.5, [0, 3, 1, 4], k=4)
    assert measured.acceptance_length == 3.0
    assert measured.per_position == [0.75, 0.5, 0.5, 0.25]


def read_log(options):
    with open(f"{options.output}/training_log.jsonl") as file:
        return [json.loads(line) for line in file]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "number"),
    [("eagle3", signal.SIGTERM), ("eagle", signal.SIGINT), ("medusa", signal.SIGINT), ("draft-lora", signal.SIGTERM)],
)
def test_a_resumed_run_ends_like_an_uninterrupted_one(method, number, options, samples, folders, tmp_path):
    more = {"draft": folders.draft, "adapter": folders.adapter} if method == "draft-lora" else {}
    if method in ("eagle3", "eagle"):
        more = {"unroll": 2, "unroll_every": 2}
    whole = options(method, output=str(tmp_path / "whole"), **more)
    train_draft(whole, samples[8:], samples[:8])
    parts = dataclasses.replace(whole, output=str(tmp_path / "parts"))
    (tmp_path / "parts").mkdir()

    def stop(line):
        if line.startswith("step 3/"):
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        train_draft(parts, samples[8:], samples[:8], report=stop)
    assert isinstance(ended.value, KeyboardInterrupt) or ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["checkpoint", "training_log.jsonl"]
    with open(tmp_path / "parts" / "training_log.jsonl", "a") as file:  # a measurement after the checkpoint
        file.write('{"step": 4}\n{"step": 1, "lo')
    torch.manual_seed(99)
    train_draft(dataclasses.replace(parts, resume=True), samples[8:], samples[:8])
    # the mean loss is over the steps of one process; what is measured and trained is the same
    logs = [[{k: v for k, v in line.items() if k != "loss"} for line in read_log(run)] for run in (whole, parts)]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [0, 3, 6]
    files = {"medusa": "medusa_lm_head.pt", "draft-lora": "adapter_model.safetensors"}
    file = files.get(method, "model.safetensors")
    read = (lambda path: torch.load(path, weights_only=True)) if method == "medusa" else load_file
    a, b = (read(tmp_path / name / file) for name in ("whole", "parts"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_checkpoints_come_by_time(options, samples, tmp_path):
    """A run that is killed goes on from the last one; without a number of steps between them."""

    def kill(line):
        if line.startswith("step 3/"):
            raise RuntimeError("killed")

    chosen = options(save_minutes=0.0)
    with pytest.raises(RuntimeError, match="killed"):
        train_draft(chosen, samples[8:], samples[:8], report=kill)
    assert torch.load(tmp_path / "checkpoint" / "state.pt", weights_only=True)["step"] == 2
    train_draft(dataclasses.replace(chosen, resume=True), samples[8:], samples[:8])
    assert [line["step"] for line in read_log(chosen)] == [0, 3, 6]


@pytest.mark.slow
def test_kept_features_change_nothing(options, samples, tmp_path, monkeypatch):
    """In a second epoch the target is not run again, and the head is the same bit for bit."""
    runs, real = [], Target.features
    monkeypatch.setattr(Target, "features", lambda *args: (runs.append(1), real(*args))[1])
    for gib in (0.0, 1.0, 2e-4):
        out = tmp_path / str(gib)
        train_draft(options(output=str(out), feature_cache=gib, steps=10), samples[8:], samples[:8])
    heads = [(tmp_path / str(gib) / "model.safetensors").read_bytes() for gib in (0.0, 1.0, 2e-4)]
    assert heads[0] == heads[1] == heads[2]
    batches = len(plan_batches(samples[8:], 256, 0)), len(plan_batches(samples[:8], 256, 0))
    counts = [10 + 5 * batches[1], sum(batches)]  # step 0, 3, 6, 9 and 10 measure
    some = sum(runs) - sum(counts)
    assert counts[1] < some < counts[0]


@pytest.mark.slow
def test_a_run_logs_its_progress(options, samples, monkeypatch):
    """Its size and warnings at the start, the duration after a few steps, and progress lines."""
    lines, real, waited = [], run_module.load, threading.Event()

    def load(*args):
        """Takes until a line has been logged."""
        for _ in range(2000):
            if lines or waited.wait(0.01):
                break
        return real(*args)

    monkeypatch.setattr(run_module, "EVERY", 0.0)
    monkeypatch.setattr(run_module, "load", load)
    train_draft(options(steps=30, eval_every=30), samples[8:], samples[:8], report=lines.append)
    text = "\n".join(lines)
    learned = sum(len(s.token_ids) - s.num_prompt_tokens for s in samples[8:])
    assert f"in 30 steps, 7.5 times over {learned:,} tokens of 32 samples" in text
    assert re.search(r"to compare: with [\d,]+ tokens .* length of \d\.\d\d; this run trains [\d,]+", text)
    assert f"warning: {learned:,} tokens to learn from are few" in text
    assert "warning: 30 steps over" in text
    assert re.search(
        r"^step 4 of 30: loss \d+\.\d+, .* s a step, [\d,]+ tokens/s, about \d+ (s|min) left$", text, re.MULTILINE
    )
    assert lines[0].startswith("loading")
    lines.clear()
    waited.set()
    train_draft(options(steps=1, progress=True), samples[8:], samples[:8], report=lines.append)
    assert not any(line.startswith("loading") for line in lines)  # there is a bar


def test_a_run_that_is_over_stays_as_it_is(options, samples, tmp_path):
    chosen = options()
    measured = train_draft(chosen, samples[8:], samples[:8])
    before = (tmp_path / "model.safetensors").read_bytes()
    again = train_draft(dataclasses.replace(chosen, resume=True), samples[8:], samples[:8])
    assert again.acceptance_length == pytest.approx(measured.acceptance_length, abs=1e-4)
    assert again.per_position == pytest.approx(measured.per_position, abs=1e-4)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [line["step"] for line in read_log(chosen)] == [0, 3, 6]


def test_the_unroll_is_left_out_of_some_steps(options, samples, tmp_path, monkeypatch):
    """Only steps of training: measurements are of the whole unroll."""
    seen = []
    steps = Eagle3Head.steps
    monkeypatch.setattr(
        Eagle3Head, "steps", lambda head, features, n: seen.append((head.training, n)) or steps(head, features, n)
    )
    train_draft(options(output=str(tmp_path), steps=5, unroll=3, unroll_every=2), samples[8:], samples[:8])
    assert [count for training, count in seen if training] == [3, 1, 3, 1, 3]
    assert {count for training, count in seen if not training} == {3, options().k}


def test_other_seeds_give_other_heads(options, samples, tmp_path):
    heads = []
    for seed in (0, 1):
        train_draft(options(seed=seed, output=str(tmp_path / str(seed)), steps=1), samples[8:], samples[:8])
        heads.append(load_file(tmp_path / str(seed) / "model.safetensors")["fc.weight"])
    assert not torch.equal(*heads)


def test_a_broken_checkpoint_is_named(options, samples, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.pt").write_bytes(b"nothing")
    with pytest.raises(InvalidRequestError, match=r"state\.pt is no checkpoint of this run"):
        train_draft(options(resume=True), samples[8:], samples[:8])


@pytest.mark.slow
def test_training_with_muon_lowers_the_loss(options, samples):
    """With AdamW the same is asked of heads in an engine."""
    chosen = options(optimizer="muon", steps=60, eval_every=60, lr=5e-3)
    train_draft(chosen, samples, samples)
    first, last = read_log(chosen)
    # Most of the loss is the target's own entropy, and an EAGLE-3 head begins as the target's last layer.
    assert last["held_out_loss"] < first["held_out_loss"] - 0.03
    assert last["acceptance_length"] > first["acceptance_length"] + 0.5


@pytest.mark.slow
def test_training_medusa_heads_lowers_the_loss(options, tmp_path):
    """They begin as the target's own head, which is right if a text repeats a token: this one never does."""
    save_counting_target(tmp_path / "target")
    samples = counting_samples()
    sizes = {"medusa_heads": 3, "k": 3, "steps": 60, "eval_every": 60}
    chosen = options("medusa", model=str(tmp_path / "target"), lr=1e-2, **sizes)
    train_draft(chosen, samples, samples)
    first, last = read_log(chosen)
    assert first["acceptance_length"] < 1.1
    assert last["acceptance_length"] > 3.5
    assert last["held_out_loss"] < first["held_out_loss"] - 5


def test_the_progress_bar_shows_loss_and_acceptance(options, samples, capsys):
    chosen = options(steps=3, eval_every=3, progress=True)
    train_draft(chosen, samples[8:], samples[:8])
    last = read_log(chosen)[-1]
    shown = capsys.readouterr().err
    loss, acceptance = re.findall(r"eagle3: 100%.* loss (\d+\.\d{4}), acceptance (\d\.\d\d)\b", shown)[-1]
    assert float(loss) == pytest.approx(last["loss"], abs=1e-4)
    assert float(acceptance) == pytest.approx(last["acceptance_length"], abs=0.01)


def test_rate_rises_and_falls():
    factors = [rate_factor(step, 100, 10) for step in range(100)]
    assert factors[:11] == sorted(factors[:11])
    assert factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[-1] < 0.02
    assert all(0 < rate_factor(step, 3, 50) <= 1 for step in range(3))


@pytest.mark.parametrize(("layers", "chosen"), [(32, (2, 16, 29)), (7, (2, 3, 4)), (5, (2, 3, 4)), (2, (0, 1, 2))])
def test_default_layers(layers, chosen):
    assert choose_aux_layers(layers) == chosen


def test_layers_that_do_not_exist(options, samples):
    with pytest.raises(InvalidRequestError, match=r"must be given: three .* target of 1"):
        choose_aux_layers(1)
    with pytest.raises(InvalidRequestError, match=r"--aux-layers .* in \[0, 4\].* 0, 1, 9"):
        train_draft(options(aux_layers=(0, 1, 9)), samples, samples)
    with pytest.raises(InvalidRequestError, match="must name 3 layers, got 2"):
        train_draft(options(aux_layers=(0, 1)), samples, samples)


def test_missing_peft_is_reported(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(OutriderError, match=r"outrider\[train\]"):
        import_peft()
    assert "outrider[train]" in target_module.MISSING_EXTRA


def test_wrong_values_are_refused(options):
    for more, words in (
        ({"method": "eagle4"}, "--method must be one of"),
        ({"steps": 0}, r"--steps must be in \[1,"),
        ({"lr": float("nan")}, r"--lr must be in \[1e-09, 10.0\]"),
        ({"k": 33}, r"--k must be in \[1, 32\]"),
        ({"method": "medusa", "draft": "x"}, "--draft is for --method eagle3 and .*, not for medusa"),
        ({"method": "draft-lora"}, "--draft names the drafter"),
        ({"method": "medusa", "draft_vocab_size": 5}, "--draft-vocab-size is for --method eagle3, not for medusa"),
        ({"rank": 4}, "--rank is for --method draft-lora and uno, not for eagle3"),
        ({"method": "draft-lora", "draft": "x", "optimizer": "muon"}, "--optimizer muon is for"),
        ({"hidden_size": 7}, "--hidden-size must be even, got 7"),
        ({"unroll_every": 0}, r"--unroll-every must be in \[1,"),
        ({"method": "eagle", "unroll": None, "unroll_every": 2}, "--unroll-every has no effect with an --unroll of 1"),
        ({"eval_data": "x", "held_out": 3}, "--held-out has no effect with --eval-data"),
        ({"base_name": ""}, "--base-name must not be empty"),
        ({"adapter": "a\0b"}, "--adapter holds a NUL"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite exclude"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            options(**more)
