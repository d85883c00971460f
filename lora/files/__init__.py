"""Files of adapters: found, checked, and read into packed rows."""
