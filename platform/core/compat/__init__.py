"""Options of other systems: tables of names that are accepted, ignored or refused."""
