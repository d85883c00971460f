"""What a row's result does to its sequence."""

from __future__ import annotations

from outrider import SamplingParams
from outrider.platform.core.batch import RowPlan, RowResult
from outrider.platform.core.messages import SpeculationCounts
from outrider.platform.core.request import Drafts, Request
from outrider.platform.engine.outcome import accept


def test_drafts_behind_the_end_of_the_text_count_as_not_accepted_everywhere():
    totals = SpeculationCounts(1, 3, 1, [1, 0, 0])
    request = Request("r", [1, 2], 2, SamplingParams(stop_token_ids=[7]), seed_key=0, speculation_totals=totals)
    request.drafts = Drafts([6, 7, 8])
    row = RowPlan(request, start=1, num_tokens=4, num_drafts=3, samples=True, max_new_drafts=3)
    delta = accept(row, RowResult([6, 7, 8, 9], num_accepted=3), max_model_len=100)
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([6, 7], "stop", 7)
    assert delta.speculation == request.speculation == SpeculationCounts(1, 3, 2, [1, 1, 0])
    assert totals == SpeculationCounts(2, 6, 3, [2, 1, 0])
