"""The database of tenants, usage and audit: connections, tables, migrations."""
