"""What node processes and ranks send each other, as bytes. Pure.

A message is a head, which JSON holds, and a body of any bytes. Between nodes every user of the
cluster can connect, so both sides first prove that they know the attempt's secret, without sending
it; each message after that carries its number and a code (keyed BLAKE2b), so that nobody can make
one up, change one, or say one again. tests/unit/control/test_wire.py holds the promises.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.core.base.secret import code, is_code
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Iterator

GREETING_BYTES = 1024
"""So long at most is what somebody may say who has not proved who he is."""
MOST_BYTES = 1 << 30
"""Of a message: all values of a gather of the largest jobs have room many times over."""

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_CODE_BYTES = 16
NONCE_BYTES = 16

Side = Literal["child", "parent"]


class Garbled(HpctrainError):
    """What came is no message of this protocol, or not of somebody's who knows the secret."""


def packed(head: dict[str, Any], body: bytes = b"") -> bytes:
    """A message."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text + body


def unpacked(message: bytes) -> tuple[dict[str, Any], bytes]:
    """The head and the body of a message.

    Raises:
        Garbled: it is none.
    """
    end = _LENGTH.size
    if len(message) >= end:
        end += _LENGTH.unpack_from(message)[0]
    try:
        head = json.loads(message[_LENGTH.size : end])
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict) or len(message) < end:
        raise Garbled("a message without a head")
    return head, message[end:]


def framed(message: bytes) -> bytes:
    """The bytes on a connection: what `Splitter` gives back at the other end."""
    return _LENGTH.pack(len(message)) + message


class Splitter:
    """Messages from what a connection brings, in pieces of any size."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Start empty; refuse a message above `most_bytes` as soon as its length is known."""
        self.most_bytes = most_bytes
        self._held = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Each message that is whole with this piece.

        Raises:
            Garbled: a message would be too long.
        """
        self._held += piece
        while len(self._held) >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._held)[0]
            if length > self.most_bytes:
                raise Garbled(f"a message of {length} bytes where {self.most_bytes} are the most")
            end = _LENGTH.size + length
            if len(self._held) < end:
                return
            message = bytes(memoryview(self._held)[_LENGTH.size : end])
            del self._held[:end]
            yield message


class Codes:
    """The codes of one connection between two nodes, at one of its ends."""

    def __init__(self, key: bytes, side: Side) -> None:
        """Start both directions at zero; `key` is of this connection alone."""
        self._keys = {
            name: hmac.digest(key, name.encode(), "sha256") for name in ("child", "parent")
        }
        self._own = self._keys[side]
        self._theirs = self._keys["parent" if side == "child" else "child"]
        self._sent = self._heard = 0

    def seal(self, message: bytes) -> bytes:
        """The message with its number and its code."""
        self._sent += 1
        numbered = _NUMBER.pack(self._sent) + message
        return _code(self._own, numbered) + numbered

    def opened(self, sealed: bytes) -> bytes | None:
        """The message; None for one that was heard before.

        Raises:
            Garbled: the other end did not send it, or something before it is missing.
        """
        given, numbered = sealed[:_CODE_BYTES], memoryview(sealed)[_CODE_BYTES:]
        if len(numbered) < _NUMBER.size or not hmac.compare_digest(
            given, _code(self._theirs, numbered)
        ):
            raise Garbled("a message without the code of this attempt")
        number = _NUMBER.unpack_from(numbered)[0]
        if number <= self._heard:
            return None
        if number != self._heard + 1:
            raise Garbled(f"message {number} came after message {self._heard}")
        self._heard = number
        return bytes(numbered[_NUMBER.size :])


def _code(key: bytes, numbered: bytes | memoryview) -> bytes:
    return hashlib.blake2b(numbered, key=key, digest_size=_CODE_BYTES).digest()


class Greeting:
    """How the two ends of a connection between nodes come to know each other.

    ```
    parent: a nonce
    child:  its number, a nonce, the code of both as child
    parent: the code of both as parent; or, to a child that it does not await, as its refusal
    ```
    """

    def __init__(self, secret: str, about: str) -> None:
        """Start with the job's `secret`; `about` names the round: peers of others are refused."""
        self._secret, self._about = secret, about
        self._own = secrets.token_hex(NONCE_BYTES)

    def challenge(self) -> bytes:
        """The parent's first message."""
        return packed({"nonce": self._own})

    def answer(self, challenge: bytes, node: int) -> tuple[bytes, bytes]:
        """The child's message, and the code that it waits for.

        Raises:
            Garbled: that is no challenge.
        """
        theirs = _nonce(unpacked(challenge)[0])
        said = packed(
            {"node": node, "nonce": self._own, "code": self._said("child", node, theirs, self._own)}
        )
        return said, packed({"code": self._said("parent", node, theirs, self._own)})

    def admit(self, answer: bytes) -> tuple[int, bytes, Codes]:
        """Of a child's answer: its number, what to tell it, and the codes of the connection.

        Raises:
            Garbled: it does not know the secret.
        """
        head = unpacked(answer)[0]
        node, theirs = head.get("node"), _nonce(head)
        if type(node) is not int or not is_code(
            head.get("code"), self._secret, "control", self._about, "child", node, self._own, theirs
        ):
            raise Garbled("an unauthenticated peer")
        said = packed({"code": self._said("parent", node, self._own, theirs)})
        return node, said, Codes(self._key(node, self._own, theirs), "parent")

    def refusal(self, answer: bytes) -> bytes:
        """What to tell a child that knows the secret, as `admit` has found, and is not awaited."""
        head = unpacked(answer)[0]
        return packed({"code": self._said("refused", head["node"], self._own, _nonce(head))})

    def is_refusal(self, challenge: bytes, node: int, proof: bytes) -> bool:
        """Return whether the real parent's two messages say that it does not await this child."""
        of_parent = _nonce(unpacked(challenge)[0])
        refused = packed({"code": self._said("refused", node, of_parent, self._own)})
        return hmac.compare_digest(proof, refused)

    def trusted(self, challenge: bytes, node: int, proof: bytes, awaited: bytes) -> Codes:
        """Return the child's codes, if the parent has proved that it knows the secret.

        `challenge` and `proof` are the parent's two messages; `awaited` came from `answer`.

        Raises:
            Garbled: the parent has not proved it.
        """
        if not hmac.compare_digest(proof, awaited):
            raise Garbled("an unauthenticated peer")
        return Codes(self._key(node, _nonce(unpacked(challenge)[0]), self._own), "child")

    def _said(
        self, side: Side | Literal["refused"], node: int, of_parent: str, of_child: str
    ) -> str:
        return code(self._secret, "control", self._about, side, node, of_parent, of_child)

    def _key(self, node: int, of_parent: str, of_child: str) -> bytes:
        return bytes.fromhex(
            code(self._secret, "control", self._about, "key", node, of_parent, of_child)
        )


def _nonce(head: dict[str, Any]) -> str:
    nonce = head.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
        raise Garbled("a greeting without a nonce")
    return nonce
