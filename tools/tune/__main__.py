"""Run the search: python tools/tune --model PATH --output DIR."""

import sys

from outrider.tools.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
