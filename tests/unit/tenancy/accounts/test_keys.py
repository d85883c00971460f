"""New keys."""

import base64
import hashlib
import re

from outrider.platform.tenancy.accounts.keys import make_key


def test_a_key():
    key = make_key()
    assert re.fullmatch(r"sk-or-[A-Za-z0-9_-]{43}", key.secret)
    assert len(base64.urlsafe_b64decode(key.secret.removeprefix("sk-or-") + "=")) == 32
    assert key.digest == hashlib.sha256(key.secret.encode()).digest()
    assert key.prefix == key.secret[:12]


def test_an_id_reveals_nothing_of_the_key():
    key = make_key()
    assert re.fullmatch(r"key-[0-9a-f]{16}", key.id)
    assert key.id.removeprefix("key-") not in key.digest.hex()


def test_keys_differ():
    keys = [make_key() for _ in range(100)]
    for field in ("id", "secret", "digest"):
        assert len({getattr(key, field) for key in keys}) == 100
