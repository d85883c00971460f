"""Registry: names, versions and mixes of adapters, and the requests that are bound to them."""
