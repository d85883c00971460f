"""Queue: which sequences run, in which order, and what each step computes of them."""
