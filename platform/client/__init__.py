"""The Python entry points (LLM, AsyncLLM) and the link to an engine in another process."""
