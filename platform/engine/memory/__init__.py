"""Memory: KV blocks, and the prefix cache over them."""
