"""Tiers: which adapters are in host memory and on the device, and the threads that move them."""
