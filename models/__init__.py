"""Model families, their layers and attention, loading and the embedded demo model."""
