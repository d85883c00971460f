"""Draft weights that are learnt from the traffic of a tenant while it is served.

    a request ends   -> Traffic     its tokens and the hidden states that the drafter has kept
    a free moment    -> HeadTrainer one slice: a pass over a few tokens, forward and backward
    a round is done  -> Learner     a new version of the weights, measured against the one before

Decision 12 says why. Everything belongs to one `Request.text_namespace`: tenant and salt, and adapter.
"""
