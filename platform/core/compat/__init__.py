"""Options of other systems: tables of names that are taken, ignored or refused."""
