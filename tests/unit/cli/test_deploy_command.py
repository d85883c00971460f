"""`outrider deploy` if Ray fails: one line."""

import socket
from types import SimpleNamespace

import pytest

from outrider.platform.cli.deploy import start_ray
from outrider.platform.core.errors import InvalidRequestError, OutriderError


def failing(error: Exception) -> SimpleNamespace:
    def init(**options):
        raise error

    return SimpleNamespace(init=init)


@pytest.mark.parametrize(
    "error", [ConnectionError("no Ray\nand more"), ValueError("bad"), RuntimeError(""), Exception("x")]
)
def test_errors_of_ray_are_one_line(error):
    with pytest.raises(InvalidRequestError, match="--ray-address: cannot connect to the Ray cluster 'auto'") as caught:
        start_ray(failing(error), "auto")
    assert "\n" not in caught.value.message
    with pytest.raises(OutriderError, match="Ray does not start on this machine: ") as alone:
        start_ray(failing(error), None)
    assert "\n" not in alone.value.message


def test_an_unreachable_ray_address_fails_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        called: list[dict] = []
        start_ray(SimpleNamespace(init=lambda **options: called.append(options)), f"127.0.0.1:{port}")
        assert [options["address"] for options in called] == [f"127.0.0.1:{port}"]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(InvalidRequestError, match="argument --ray-address: nothing listens at"):
            start_ray(SimpleNamespace(init=None), address)
