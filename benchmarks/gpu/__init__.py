"""Sections of `gpu_check.py`, one module each."""
