"""`outrider bench`: measurements that users can repeat. `command` is the command line; it imports nothing heavy."""
