"""The ledger of requests: its journal on the local disk, its rows in the database, reports over them."""
