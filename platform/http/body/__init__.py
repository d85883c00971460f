"""Request bodies: read in pieces, bounded before they are parsed, lenient where clients are."""
