"""Trials of more drafts than are usual."""

from outrider.spec_decode.controller import Controller, DrafterTraits
from outrider.spec_decode.lanes import RowState
from outrider.spec_decode.probing import TRIAL_MORE
from outrider.spec_decode.step_costs import DraftSize

NEURAL = DrafterTraits("eagle3", True)


def test_one_draft_more_is_measured_as_others_are():
    """So that it is not thought to take longer than it would; other trials are measured throughout."""
    controller = Controller([NEURAL], 4)
    row = RowState(controller.lane((b"a", False)))
    seen = []
    for _ in range(3000):
        count = row.num_drafts
        if controller.due(1, False):
            row.limit = 4
            controller.decide([row], 0)
            seen.append((row.num_drafts, controller.is_steady, controller.steps_left))
        controller.costs.add_step(1, 1 + count, 0.001 * (1.0 + 0.3 * max(0, count - 1)))
        if count:
            controller.proposed(0, [(row, count, count)])
            controller.costs.add_draft(0, DraftSize(1, count), 0.0001 * count)
            controller.verified({row: [(count, 1)]})
        controller.stepped(0.001)
    usual = max({count for count, *_ in seen}, key=[count for count, *_ in seen].count)
    assert usual == 1, "the second is always wrong"
    more = [(is_steady, left) for count, is_steady, left in seen[20:] if count == usual + 1]
    assert more
    assert set(more) == {(True, TRIAL_MORE)}
