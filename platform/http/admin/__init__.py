"""Administration over HTTP: tenants, keys, usage, audit and shared prefixes."""
