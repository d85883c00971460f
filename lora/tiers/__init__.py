"""Tiers: adapters in host memory and on the device, and the threads that copy them."""
