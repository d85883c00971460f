"""Anthropic's Messages API, on top of chat completions.

    request:  system, messages, tools -> chat messages and a chat request (`translation.py`) -> the chat's own job
    answer:   text -> deltas of the chat's parser -> content blocks, whole or as events (`blocks.py`)

There is no second way to generate: the prompt, the parser of calls and reasoning, the limits and the ledger are those
of `/v1/chat/completions`.
"""
