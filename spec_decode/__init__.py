"""Speculative decoding: drafters propose tokens, and the target verifies them all in its next step.

control     chooses, before a step runs, who drafts for each request and how many tokens
drafters    propose them: n-gram, suffix, draft model, EAGLE, Medusa
verify      draws drafts from a drafter's distribution, and accepts or rejects them; the text stays the target's own
training    trains draft heads and adapters' draft weights
"""
