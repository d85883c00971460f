"""Models and adapters of a server: their names, who sees them, the routes that load and unload them."""
