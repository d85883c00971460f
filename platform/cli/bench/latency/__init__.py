"""`outrider bench latency`: one batch, repeated, and where the time of its steps goes."""
