"""`outrider bench serve`: groups of requests to servers, side by side."""
