"""Drafters: each proposes tokens that the target then verifies. `base` has the contract, `factory` the choice."""
