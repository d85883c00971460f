"""The updates that an engine needs that is started again."""

from outrider.platform.client.weight_updates import AppliedUpdate, WeightUpdates
from outrider.platform.core.weight_source import WeightSource


def update(*paths: str, draft: bool = False) -> AppliedUpdate:
    return AppliedUpdate([WeightSource(path) for path in paths], draft)


def test_updates_that_others_replace_are_forgotten() -> None:
    updates = WeightUpdates()
    for _ in range(3):  # a trainer writes the same files again
        updates.add(update("a", "b"), is_whole=False, version=None)
        updates.add(update("c"), is_whole=False, version="1")
        updates.add(update("a", draft=True), is_whole=True, version=None)
    assert updates.applied == [update("a", "b"), update("c"), update("a", draft=True)]
    updates.add(update("d"), is_whole=True, version="2")
    assert updates.applied == [update("a", draft=True), update("d")]
    assert updates.version == "2"
