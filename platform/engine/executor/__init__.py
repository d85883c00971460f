"""Executors compute the passes of a step's plan, in this process or in several.

    Scheduler -> ModelRunner -> Executor -> model            `LocalExecutor`
                                         -> model, rank 0    `ParallelExecutor`
                                         => model, rank 1 .. (`rank_process`)

Rank 0 schedules, samples, verifies, drafts and keeps all state of requests. Before it computes its share of a pass it
sends the pass to the other ranks: rows of tokens, block tables and adapters, from which every rank builds the same
batch. It also sends them an adapter's rows before it writes its own. Only weights, KV and adapters' rows are divided,
so no other state can diverge between ranks.
"""
