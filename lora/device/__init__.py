"""Device: rank rows, where adapters apply in a model, and the inputs of a step's LoRA products."""
