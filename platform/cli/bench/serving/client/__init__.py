"""The client of `outrider bench serve`: arrivals, HTTP, streams, and facts from the server."""
