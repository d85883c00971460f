"""`outrider` whose servers count as dead after three seconds of silence, and not after ten."""

import functools
import sys

from outrider.platform.cli.main import main
from outrider.platform.tenancy import service

service.Limiter = functools.partial(service.Limiter, lease_seconds=3.0)

if __name__ == "__main__":
    sys.exit(main())
