"""The server of these tests ends; the last file, so that it is not started again."""

import signal

import openai


def test_a_shutdown_without_a_wait_accounts_for_cut_requests(site):
    server = site.server
    client = server.client(site.keys["free"])
    body = {"model": "outrider-demo", "prompt": "Once", "stream": True, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**body, max_tokens=450) for _ in range(8)]
    ids = {next(iter(stream)).id for stream in streams}
    server.process.send_signal(signal.SIGTERM)
    errors = []
    for stream in streams:
        try:
            with stream:
                for _ in stream:
                    pass
        except openai.APIError as error:
            errors.append(error.body["type"])
    assert server.process.wait(60) == 0
    assert set(errors) == {"ShuttingDownError"}
    rows = [row for row in site.rows("free") if row.request_id in ids]
    assert len(rows) == 8
    assert [row.status for row in rows].count("error") == len(errors)
    for row in rows:
        assert (row.status, row.error_type) in (("error", "ShuttingDownError"), ("length", ""))
        assert row.output_tokens > 0
    assert len(site.rows("free")) == len({row.request_id for row in site.rows("free")})
