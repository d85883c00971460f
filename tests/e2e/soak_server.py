"""`outrider` whose server, at SIGUSR1, has its engine check its allocators and prints the result."""

import asyncio
import signal
import sys

from outrider.platform.cli.main import main
from outrider.platform.client import async_llm
from outrider.platform.core.errors import OutriderError


class Checked(async_llm.AsyncLLM):
    async def start(self):
        info = await super().start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(self._check()))
        return info

    async def _check(self):
        try:
            await self.engine.call("check_integrity")
        except OutriderError as error:
            print(f"integrity: {error.message}", flush=True)
        else:
            print("integrity: clean", flush=True)


async_llm.AsyncLLM = Checked

if __name__ == "__main__":
    sys.exit(main())
