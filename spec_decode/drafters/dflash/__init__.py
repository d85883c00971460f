"""DFlash and DSpark: drafts of a whole block in one pass."""
