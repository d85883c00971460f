"""The command line: `outrider serve` and its siblings."""
