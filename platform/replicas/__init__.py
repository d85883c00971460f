"""Replicas of the server on a Ray Serve cluster, and the choice of the replica that answers a request.

    request --> Ingress --(adapter, prefixes of the text)--> AffinityRouter --> one of N replicas --> a stream

A replica is all of `outrider serve` but its socket: engine process, tenants, adapters, routes. `routing` decides and
knows nothing of Ray; `deployment` is the rest of Ray.
"""
