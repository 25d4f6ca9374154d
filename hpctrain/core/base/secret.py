"""Codes of a shared secret, by which the processes of a run know each other's words. Pure.

Where the secret lies is `run/ownership.py`. A secret is never sent; what is sent carries a code
(HMAC-SHA256) that nobody can make without it, over what it is about and not the value alone, so
that a value cannot be taken from one place to another. tests/unit/base/test_secret.py holds the
promises.
"""

from __future__ import annotations

import json

BYTES = 32
CODE_LENGTH = 64


class Forged(ValueError):
    """What came carries no code of somebody's who knows the secret."""


def new_secret() -> str:
    """A secret, as text."""
    import secrets  # here and below: every command reads this module, few of them sign anything

    return secrets.token_hex(BYTES)


def code(secret: str, *words: str | int) -> str:
    """The code of these words in this order; who has it knows nothing of any other's."""
    import hashlib
    import hmac

    text = json.dumps(words).encode()  # no two lists of words have one text
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def is_code(given: object, secret: str, *words: str | int) -> bool:
    """Whether that is the code of these words. Takes as long for a wrong one as for the right."""
    import hmac

    return isinstance(given, str) and hmac.compare_digest(
        given.encode(errors="replace"), code(secret, *words).encode()
    )


def sign(secret: str, about: str, value: str) -> str:
    """The value with its code.

    `about` is what it is the value of; the same words at both ends.
    """
    return code(secret, about, value) + value


def verify(secret: str, about: str, signed: str | bytes) -> str:
    """The value that was signed.

    Raises:
        Forged: by nobody who knows the secret, or as the value of something else.
    """
    try:
        text = signed.decode() if isinstance(signed, bytes) else signed
    except UnicodeDecodeError:
        raise Forged(about) from None
    given, value = text[:CODE_LENGTH], text[CODE_LENGTH:]
    if not is_code(given, secret, about, value):
        raise Forged(about)
    return value
