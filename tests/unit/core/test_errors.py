"""Errors keep their type and field in messages between processes."""

from __future__ import annotations

import pytest

from outrider import LoRARequest
from outrider.platform.core import errors


@pytest.mark.parametrize(
    "kind", [errors.PromptTooLongError, errors.NotFoundError, errors.AdapterError, errors.EngineDeadError]
)
def test_round_trip(kind):
    error = errors.error_from_info(kind("what", param="field").info())
    assert type(error) is kind
    assert (error.message, error.param) == ("what", "field")


def test_an_unknown_type_is_still_an_error():
    error = errors.error_from_info(errors.ErrorInfo("Newer", "what"))
    assert type(error) is errors.OutriderError


def test_both_spellings_of_a_lora_request():
    assert LoRARequest("a", 3, "/x").path == LoRARequest("a", path="/x").path == "/x"


@pytest.mark.parametrize(
    ("arguments", "param"), [(("",), "lora_name"), (("a", "/x"), "lora_int_id"), (("a", 1), "lora_path")]
)
def test_wrong_lora_requests_name_the_field(arguments, param):
    with pytest.raises(errors.InvalidRequestError) as caught:
        LoRARequest(*arguments)
    assert caught.value.param == param


def test_messages_can_be_sent_whatever_names_they_quote():
    info = errors.InvalidRequestError("no tensor \ud800 here").info()
    assert info.message.encode() == rb"no tensor \ud800 here"
