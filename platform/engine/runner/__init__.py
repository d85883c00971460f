"""Runner: a planned step on the device, the order of steps, and warm-up before the first request."""
