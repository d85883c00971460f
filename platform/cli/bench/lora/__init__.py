"""`outrider bench lora`: the cost of adapters."""
