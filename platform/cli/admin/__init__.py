"""`outrider admin`: tenants, keys, usage and shared prefixes, in the database that servers use."""
