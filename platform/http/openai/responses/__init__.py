"""`/v1/responses`: OpenAI's second API for conversations, as a translation to a chat and back.

    request   input items (of the previous response, and new ones) -> messages; other fields -> those of a chat
    job       `chat_job`, as for a chat: the same prompt, limits, adapter, row in the ledger
    answer    deltas of the chat's parser -> output items, with an event for each step
    store     the response and its items, for `previous_response_id`, until evicted for others

`protocol.py` has the request, `conversation.py` its items, `translation.py` its other fields, `output.py` the answer's
items, `answer.py` the response object and the stream, `store.py` the stored responses, `routes.py` the routes.
"""
