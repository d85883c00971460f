"""`outrider bench latency | throughput | serve`, as in `vllm bench`; `command` lists them."""
