"""`outrider bench lora`: what adapters cost."""
