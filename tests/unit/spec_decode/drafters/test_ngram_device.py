"""Prompt lookup on the device compared with the host's, over steps whose results the host has late or at once."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.kernels.device_outcome import DeviceOutcome
from outrider.platform.core.request import Request, Status
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters import ngram_device
from outrider.spec_decode.drafters.base import DeviceStep, DraftRow, TargetOutput
from outrider.spec_decode.drafters.factory import DrafterContext, make_drafter
from outrider.spec_decode.drafters.ngram import lookup
from outrider.spec_decode.drafters.ngram_device import DeviceNgramDrafter

MIN, MAX, VOCAB = 1, 3, 4


def expected(text: list[int], count: int) -> list[int]:
    start = lookup(np.array(text, dtype=np.int32), MIN, MAX)
    return (text[start:] * count)[:count]


class Running:
    """Requests, of which the host knows `request.tokens`, and the device `text`."""

    def __init__(self, max_rows: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.drafter = DeviceNgramDrafter(
            MIN, MAX, by_match=False, max_rows=max_rows, max_tokens=300, device=torch.device("cpu")
        )
        self.texts: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def add(self, name: str) -> None:
        tokens = self.tokens(self.rng.randint(2, 20))
        self.requests[name] = Request(name, tokens, len(tokens), SamplingParams(), seed_key=0)
        self.requests[name].status = Status.RUNNING
        self.texts[name] = [*tokens]

    def step(self, names: list[str], num_drafts: int, wanted: int | None, *, late: int = 0) -> list[list[int]]:
        """A step of rows that verify `num_drafts` each and want `wanted` drafts; None: it is only watched. Their start
        is planned `late` positions too far. The drafts."""
        rows, generated, accepted, first = [], [], [], 0
        for name in names:
            right = self.rng.randint(0, num_drafts)
            new = self.tokens(1 + right)
            generated += [*new, *[9] * (num_drafts - right)]
            accepted.append(right)
            end = len(self.texts[name]) + late + num_drafts
            rows.append(
                DraftRow(
                    self.requests[name], range(end + 1), end, 0, wanted or 0, [], True, end - num_drafts - 1, first,
                    num_drafts,
                )
            )  # fmt: skip
            first += 1 + num_drafts
            self.texts[name] += new
        numbers = [torch.tensor(x) for x in (generated, accepted)]
        outcome = DeviceOutcome(numbers[0], numbers[1], numbers[1], None, None, [1 + num_drafts] * len(names))
        target = TargetOutput(on_device=DeviceStep(outcome, None))
        if wanted is None:
            self.drafter.watch(rows, target)
            return []
        return [list(proposal.drafts.token_ids) for proposal in self.drafter.propose(rows, target)]

    def commit(self, names: list[str]) -> None:
        for name in names:
            self.requests[name].tokens[:] = self.texts[name]

    def host_step(self, names: list[str]) -> list[list[int]]:
        """A step that the host waits for, before it drafts."""
        rows: list[Any] = []
        for name in names:
            self.texts[name] += self.tokens(2)
        self.commit(names)
        for name in names:
            text = self.requests[name].tokens
            rows.append(DraftRow(self.requests[name], text, len(text) - 1, 0, 3, [], True))
        return [list(proposal.drafts.token_ids) for proposal in self.drafter.propose(rows, TargetOutput())]


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_all_kinds(seed: int) -> None:
    running = Running(3, seed)
    rng = random.Random(seed)
    for index in range(3):
        running.add(str(index))
    late = False
    for _ in range(30):
        names = rng.sample("012", rng.randint(1, 3)) if not late else [*"012"]
        kind = rng.randrange(4)
        if kind == 0:
            running.commit([*"012"])
            late = False
            got = running.host_step(names)
            assert got == [expected(running.texts[name], 3) if _repeats(running, name) else [] for name in names]
            continue
        if not late:
            running.commit([*"012"])
            running.step([*"012"], 0, None)  # from now on the host does not know the tokens of any
            late = True
            continue
        wanted = rng.choice([None, 1, 4])
        got = running.step(names, rng.randint(0, 3), wanted, late=3)
        if wanted is not None:
            assert got == [_drafts(running, name, wanted) for name in names]


def _repeats(running: Running, name: str) -> bool:
    return lookup(np.array(running.texts[name], dtype=np.int32), MIN, MAX) >= 0


def _drafts(running: Running, name: str, count: int) -> list[int]:
    """Without a match the last token is repeated."""
    return expected(running.texts[name], count) if _repeats(running, name) else running.texts[name][-1:] * count


def test_a_discarded_step_leaves_no_trace() -> None:
    """Its tokens were appended on the device; the step is planned again with what the host knows."""
    running = Running(1)
    running.add("a")
    running.step(["a"], 0, 2)
    running.texts["a"] = [*running.requests["a"].tokens]
    for _ in range(5):
        assert running.step(["a"], 2, 4) == [_drafts(running, "a", 4)]
        running.commit(["a"])


def test_slots_are_reused() -> None:
    """Slots of finished requests, and, if there are more requests than rows, of preempted ones."""
    running = Running(2)
    for name in "abc":
        running.add(name)
    for name in "ab":
        assert running.step([name], 0, 3) == [_drafts(running, name, 3)]
    running.commit([*"ab"])
    assert running.step(["b", "c"], 0, 3) == [_drafts(running, name, 3) for name in "bc"]  # a is preempted
    running.commit([*"bc"])
    running.requests["b"].status = Status.FINISHED
    assert running.step(["a", "c"], 0, 3) == [_drafts(running, name, 3) for name in "ac"]


def test_a_name_used_again_is_a_new_request() -> None:
    running = Running(1)
    for _ in range(3):
        running.add("a")
        assert running.step(["a"], 0, 3) == [_drafts(running, "a", 3)]


def test_rows_of_prompts_are_skipped() -> None:
    """A chunk that samples nothing has no outcome."""
    running = Running(2)
    running.add("a")
    request = running.requests["a"]
    chunk = DraftRow(request, range(5), 4, 0, 0, [], False)
    running.drafter.watch([chunk], TargetOutput(on_device=DeviceStep(None, None)))
    assert running.step(["a"], 0, 3) == [_drafts(running, "a", 3)]


@pytest.mark.parametrize("has_corpus", [False, True])
def test_corpora_are_searched_on_the_host(has_corpus: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_device, "runs_on", lambda device: True)
    config: dict[str, Any] = {"method": "ngram"}
    if has_corpus:
        (tmp_path / "texts.jsonl").write_text('{"token_ids": [1, 2, 3]}\n')
        config["prompt_lookup_corpus"] = str(tmp_path / "texts.jsonl")
    parsed = parse_speculative(config)
    assert parsed is not None
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    context = DrafterContext(target=target, device="cpu", dtype="float32", max_num_seqs=2)  # type: ignore[arg-type]
    assert make_drafter(parsed, context).needs.drafts_on_device != has_corpus
