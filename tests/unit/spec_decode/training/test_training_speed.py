"""The speed that a training run shows, and the time that it estimates."""

import re

from outrider.spec_decode.training.speed import Speed


def test_the_estimate_is_one_of_whole_cycles():
    """With --unroll-every 4 one step in four takes longer; an estimate from the others alone is too low."""
    speed = Speed(0, 81, 1000, cycle=4)
    found = []
    for step in range(9):
        speed.note(step + 1, [1.0], 100, 7.0 if step % 4 == 0 else 1.0)
        found.append(re.search(r"about (.*) left", speed.describe()))
    assert found[2] is None, "without the first step, which warms up, there are two"
    assert found[4] is not None
    assert found[8][1] == f"{72 * 10 / 4 / 60:.0f} min"
