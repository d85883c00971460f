"""Request bodies: read in pieces, bounded before they are parsed, lenient in what clients get wrong."""
