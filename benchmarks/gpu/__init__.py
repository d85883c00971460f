"""What `gpu_check.py` does, a module a section."""
