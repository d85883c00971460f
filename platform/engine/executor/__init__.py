"""Executors: what computes the passes of a step's plan, in this process or in several.

    Scheduler -> ModelRunner -> Executor -> model            `LocalExecutor`
                                         -> model, rank 0    `ParallelExecutor`
                                         => model, rank 1 .. (`rank_process`)

Rank 0 schedules, samples, verifies, drafts and keeps all state of requests. It tells the other ranks each pass before
it computes its share: rows of tokens, block tables and adapters, from which every rank builds the same batch. It tells
them an adapter's rows before it writes its own. Only weights, KV and adapters' rows are divided, so nothing else can
come to differ between ranks.
"""
