"""`outrider bench latency --profile`: the time of each part of a step."""
