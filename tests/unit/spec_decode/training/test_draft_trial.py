"""The trial at the end of a run, and the progress of generated completions."""

import json
import re

import pytest

from outrider import LLM
from outrider.platform.cli import completions, draft_trial
from outrider.platform.cli.draft_trial import Decoding, Trial, describe_trial
from outrider.platform.core.errors import OutriderError
from outrider.spec_decode.training.run import train_draft


def lines_with(trials, options, samples, monkeypatch):
    monkeypatch.setattr(draft_trial, "run_trials", lambda *_: trials)
    return "\n".join(describe_trial(options(), samples))


def test_the_best_number_of_drafts_is_named(options, samples, monkeypatch):
    text = lines_with([Trial(1, 1.2, 1.5), Trial(2, 1.3, 2.0), Trial(4, 2.0, 2.2)], options, samples, monkeypatch)
    assert "2 drafts: acceptance length 2.00, break-even 1.30: 1.54 times the speed without drafts" in text
    assert text.endswith("worth serving, best with num_speculative_tokens 2")


def test_a_drafter_that_loses_is_not_recommended(options, samples, monkeypatch):
    text = lines_with([Trial(1, 1.5, 1.2), Trial(2, 1.6, 1.4)], options, samples, monkeypatch)
    assert "not worth serving here: a step with 2 drafts takes 1.60 times as long" in text
    assert "more prompts" in text
    assert "num_speculative_tokens" not in text


def test_break_even_is_the_ratio_of_step_times():
    trial = draft_trial._compare(Decoding(2.0, 100, 100), Decoding(1.5, 90, 50), 3)
    assert trial.break_even == pytest.approx(1.5)
    assert trial.acceptance_length == pytest.approx(1.8)
    assert trial.speedup == pytest.approx(1.2)
    with pytest.raises(OutriderError, match="no room for an answer"):
        draft_trial._compare(Decoding(0.0, 0, 0), Decoding(0.0, 0, 0), 3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle3", "draft-lora", "uno"])
def test_a_trial_serves_the_trained_drafter(method, options, samples, folders):
    """An untrained Medusa head says the target's own last token again, so on repetitive text it is often right."""
    own = {"draft-lora": {"draft": folders.draft, "adapter": folders.adapter}, "uno": {"adapter": folders.adapter}}
    chosen = options(method=method, steps=2, k=3, **own.get(method, {}))
    train_draft(chosen, samples[8:], samples[:8])
    trials = draft_trial.run_trials(chosen, [s.token_ids[: s.num_prompt_tokens] for s in samples[:2]])
    assert [trial.num_drafts for trial in trials] == [1, 2, 3]
    assert all(1 <= trial.acceptance_length <= trial.num_drafts + 1 for trial in trials)
    assert all(trial.break_even > 0 for trial in trials)
    if method == "medusa":
        assert trials[-1].acceptance_length > 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sizes"), [("medusa", {"medusa_heads": 2}), ("dflash", {"block_size": 3, "draft_layers": 1})]
)
def test_a_trial_asks_for_no_more_drafts_than_there_are(method, sizes, options, samples):
    chosen = options(method=method, steps=1, k=4, **sizes)
    train_draft(chosen, samples[8:], samples[:8])
    trials = draft_trial.run_trials(chosen, [samples[0].token_ids[: samples[0].num_prompt_tokens]])
    assert [trial.num_drafts for trial in trials] == [1, 2]


def test_draft_weights_without_an_adapter_are_not_served(options, samples, folders):
    """The engine would draft with the model that they are for, and without them."""
    with pytest.raises(OutriderError, match="--adapter names none"):
        list(describe_trial(options("draft-lora", draft=folders.draft), samples))


def test_only_eagle_3_is_compared_with_an_eagle_3_head(options, samples):
    for method, quoted in (("medusa", False), ("eagle3", True)):
        lines = []
        train_draft(options(method=method, steps=1, overwrite=True), samples[8:], samples[:8], report=lines.append)
        assert any("EAGLE-3 head of a 135M model" in line for line in lines) is quoted


def test_progress_estimates_no_time_from_the_first_or_last_answers(options, samples, folders, tmp_path):
    """If answers start together the shortest end first and the longest last, so the number of those that have
    ended says nothing about the time left."""
    described, file = [], tmp_path / "generated.jsonl"
    prompts = [[7, 8, 9 + n] for n in range(6)]

    class Spy(completions._Writer):
        def add(self, index, output):
            super().add(index, output)
            described.append(self.describe())

    with pytest.MonkeyPatch.context() as patch, LLM(folders.target, dtype="float32", max_num_seqs=2) as llm:
        patch.setattr(completions, "_Writer", Spy)
        completions.complete(options(generate=True, max_tokens=8), llm, None, prompts, file, lambda line: None)
    assert re.fullmatch(r"generated 1 of 6 answers, [\d,]+ tokens/s, \d+ s so far", described[0])
    assert re.fullmatch(r"generated 3 of 6 answers, [\d,]+ tokens/s, about \d+ (s|min) left", described[2])
    assert re.search(r"generated [45] of 6 answers, .* the last [12] are being written$", described[-2])
    assert [json.loads(line)["prompt_token_ids"] for line in file.read_text().splitlines()] == prompts


def test_damaged_lines_of_completions_are_generated_again(tmp_path):
    file = tmp_path / "generated.jsonl"
    file.write_text('{"number": 2, "prompt_token_ids": [1]}\nnot JSON\n{"number": [3]}\n[3]\n{"number": 0, "prompt')
    assert completions.completed(file, mend=True) == {2: {"prompt_token_ids": [1]}}
    assert file.read_text().endswith("[3]\n")
