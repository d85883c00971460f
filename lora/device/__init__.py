"""Device: rank rows, the sites of a model to which adapters apply, and the adapters of a step."""
