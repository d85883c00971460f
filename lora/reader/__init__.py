"""Reader: a separate process that reads adapters' files concurrently with the engine's steps."""
