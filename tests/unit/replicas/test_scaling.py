"""The number of replicas, without Ray."""

import pytest

from outrider.platform.replicas.scaling import KV_TARGET, replicas_needed


@pytest.mark.parametrize(
    ("requests", "usage", "needed"),
    [
        (64, [0.1, 0.1], 2),  # 32 each
        (65, [0.1, 0.1], 65 / 32),
        (4, [KV_TARGET, KV_TARGET], 2),  # few requests, which are long
        (4, [1.0, 1.0], 2 / KV_TARGET),
        (0, [0.0, 0.0], 0),
        (10, [], 10 / 32),  # no replica has said anything yet
    ],
)
def test_replicas_needed_is_the_larger_of_requests_and_cache(requests, usage, needed):
    assert replicas_needed(requests, 32, usage) == pytest.approx(needed)
