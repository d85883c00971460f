"""Calls of tools and reasoning in chat answers.

    request:  tools, tool_choice -> prompt (the chat template writes the tools), and for a forced call a grammar
    answer:   text, piece by piece -> parser of the model's format -> deltas: content, reasoning_content, tool_calls

`formats.py` has the formats, `choice.py` reads the request, `parser.py` the answer.
"""
