"""The engine: one step over rows of tokens, its scheduler, KV cache and model runner."""
