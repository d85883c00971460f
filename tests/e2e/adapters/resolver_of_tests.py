"""A plug-in for the server of the tests: "slow://NAME" waits for a file, and names "plug-NAME" are found."""

import os
import time


class Resolver:
    """Finds the adapters below the folder that the variable OUTRIDER_TEST_STORE names."""

    def __init__(self) -> None:
        self._store = os.environ["OUTRIDER_TEST_STORE"]

    def resolve(self, name: str, source: str | None) -> str | None:
        if source is not None and source.startswith("slow://"):
            while not os.path.exists(os.path.join(self._store, "go")):
                time.sleep(0.01)
            return os.path.join(self._store, source.removeprefix("slow://"))
        if source == "down://store":
            raise ConnectionError("the store is down")
        if source is None and name.startswith("plug-"):
            return os.path.join(self._store, name.removeprefix("plug-"))
        return None
