"""Options of the command line: one module for each group, and the parser of all commands."""
