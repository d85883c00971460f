"""Requests in files: `/v1/batches`, and what `outrider run-batch` has in common with it.

    line -> `LineRequest` (lines.py) -> the server's application (sender.py) -> line of the answers (answers.py)

A batch is a folder on disk (`store.py`). `run.py` takes one batch to its end, `service.py` finds batches to run, and
`turns.py` decides which line is next.
"""
