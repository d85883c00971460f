"""Drafters: each proposes tokens that the target then verifies.

`base` is the contract and `factory` the registry. A new drafter is a module or a folder here with a subclass of
`Drafter` and a function `load`, a line in the registry, and its method's name in `platform.core.speculative_config`.
"""
