"""Reader: another process that reads adapters' files beside the engine's steps."""
