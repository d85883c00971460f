"""Speculative decoding: drafters propose tokens, and the target verifies them all in its next step.

control     chooses, before a step runs, each request's drafter and number of drafts
drafters    propose them: n-gram, suffix, draft model, EAGLE, Medusa
verify      draws drafts from a drafter's distribution, and accepts or rejects them; the text stays the target's own
training    trains draft heads and adapters' draft weights
"""
