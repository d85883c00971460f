"""Multi-token prediction heads of the target's own checkpoint as drafters."""
