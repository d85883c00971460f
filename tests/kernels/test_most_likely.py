"""The greedy choice of the C++ kernel, of the torch path, and through the sampler's short way."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider import SamplingParams
from outrider.kernels.native import library
from outrider.kernels.sampling import most_likely, native
from outrider.platform.core.request import Drafts, Request
from outrider.platform.engine.sampling import sampler as sampler_module
from outrider.platform.engine.sampling.sampler import Sampler, SampleRow

INF, NAN = math.inf, math.nan


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on both paths."""
    if request.param == "torch":
        monkeypatch.setattr(native, "most_likely", lambda logits: None)
    elif library() is None:
        pytest.skip("no C++ compiler, or switched off")
    return str(request.param)


def check(logits: Tensor) -> None:
    tokens, tops = most_likely(logits)
    for row, token, top in zip(logits, tokens, tops, strict=True):
        if row.isnan().any():
            assert math.isnan(top)
        else:
            assert token == row.argmax().item()  # the first among equals
            assert top == row.amax().item()


@pytest.mark.parametrize("size", [1, 2, 7, 15, 16, 17, 31, 32, 33, 1000, 4099])
@pytest.mark.parametrize("rows", [0, 1, 3, 70])
def test_against_torch(path: str, rows: int, size: int) -> None:
    check(torch.randn(rows, size))
    check(torch.randint(0, 3, (rows, size)).float())  # nearly everything is a tie


def test_rows_apart_from_each_other(path: str) -> None:
    check(torch.randn(9, 100)[:, :57])
    check(torch.randn(9, 64)[::2])
    check(torch.randn(64, 9).t())  # not for the kernel: its logits do not lie side by side


@pytest.mark.parametrize("place", [0, 15, 16, 40, 49])
def test_special_values(path: str, place: int) -> None:
    logits = torch.zeros(4, 50)
    logits[0, place] = NAN
    logits[1, place] = INF
    logits[2] = -INF
    logits[3] = -INF
    logits[3, place] = -5.0
    check(logits)
    assert most_likely(logits)[1][1:] == [INF, -INF, -5.0]


def make_rows(drafts: list[list[int]], **edits: Any) -> list[SampleRow]:
    params = SamplingParams(temperature=0.0, **edits)
    return [SampleRow(Request(f"r{i}", [1, 2], 2, params, seed_key=i), Drafts(ids)) for i, ids in enumerate(drafts)]


@settings(max_examples=60)
@given(st.data())
def test_fast_path_equals_the_general_path(data: st.DataObject) -> None:
    token = st.integers(0, 5)
    drafts = data.draw(st.lists(st.lists(token, max_size=3), min_size=1, max_size=4))
    value = st.sampled_from([0.0, 1.0, 2.0, 3.0, -INF, INF, NAN])
    count = sum(1 + len(ids) for ids in drafts)
    logits = torch.tensor(data.draw(st.lists(st.lists(value, min_size=6, max_size=6), min_size=count, max_size=count)))
    # Mostly sound rows, or nearly all of them end at their first position.
    sound = torch.tensor(data.draw(st.lists(st.booleans() | st.just(True), min_size=count, max_size=count)))
    logits = torch.where(sound[:, None], torch.randint(0, 4, logits.shape).float(), logits)
    few = st.lists(token, min_size=1, max_size=2)
    edits = {"logit_bias": {3: -1.0, 5: 0.5}, "allowed_token_ids": data.draw(few)} if data.draw(st.booleans()) else {}
    rows = make_rows(drafts, **edits)
    short = Sampler()(logits.clone(), rows)
    for row in rows:
        row.request.sampling = dataclasses.replace(row.request.sampling, is_plain=False)
    assert short == Sampler()(logits.clone(), rows)


@pytest.mark.parametrize("special", [{"temperature": 1.0}, {"logprobs": 0}])
def test_one_special_row_uses_the_general_path(special: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_most_likely", lambda logits, rows: pytest.fail("the short way"))
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 9} | special)
    odd = SampleRow(Request("odd", [1, 2], 2, params, seed_key=1), Drafts([]))
    results = Sampler()(torch.randn(2, 6), [*make_rows([[]]), odd])
    assert [len(got.token_ids) for got in results] == [1, 1]
