"""`outrider bench latency | throughput | serve | compare`, as users of `vllm bench` know them; `command` lists them."""
