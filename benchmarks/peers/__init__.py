"""Parts of `compare_peers.py`: other engines, each in its own environment, measured side by side."""
