"""Runner: a planned step on the device, the order of steps, and what is done before the first request."""
