"""`outrider bench latency | throughput | serve | compare`, as in `vllm bench`; `command` lists them."""
