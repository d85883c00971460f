"""`outrider` whose server answers `GET /probe` with the longest time that its event loop stood still since the last
call, and its memory."""

import asyncio
import sys
import time

import psutil

from outrider.platform.cli.main import main
from outrider.platform.http import app as app_module

TICK_SECONDS = 0.002


class Probe:
    """The longest lateness of a timer. What other processes take of the processor does not count: the loop stood still
    for no longer than this process worked meanwhile."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task: asyncio.Task | None = None

    async def answer(self) -> dict[str, float]:
        if self._task is None:
            self._task = asyncio.ensure_future(self._watch())
        await asyncio.sleep(2 * TICK_SECONDS)  # the watch may not have seen the end of a standstill
        longest, self.longest = self.longest, 0.0
        return {"stall": longest, "memory": psutil.Process().memory_info().rss}

    async def _watch(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(TICK_SECONDS)
            late = min(time.perf_counter() - wall, time.process_time() - cpu) - TICK_SECONDS
            self.longest = max(self.longest, late)


create_app = app_module.create_app


def create_probed_app(*args, **options):
    app = create_app(*args, **options)
    app.add_api_route("/probe", Probe().answer, include_in_schema=False)
    return app


app_module.create_app = create_probed_app

if __name__ == "__main__":
    sys.exit(main())
