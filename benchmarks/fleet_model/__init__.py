"""Discrete-event model of many replicas that serve adapters, with the times of real ones.

A replica repeats steps. A step gives every running request its next token and fills a budget with prompt tokens; its
time comes from a table of real steps (`costs.py`). A request needs a row and its adapter in a slot; slots are reused
least recently used first. One adapter is read at a time, alongside steps and pausing for prompts, and written alongside
one more step (`replica.py`). A router sends each request to a replica (`routing.py`), replicas fail and start again
empty (`simulation.py`).

Left out: memory for KV (a row always has room), speculation, prompt pacing, host memory for adapters, the network.
"""
