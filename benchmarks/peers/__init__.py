"""What `compare_peers.py` needs: other engines, each in its own environment, measured side by side."""
