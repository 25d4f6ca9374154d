"""The lines of a file that others write too, in blocks: no line and no hole costs much memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.files import skip_hole

if TYPE_CHECKING:
    from io import FileIO

BLOCK_BYTES = 1 << 20
LONGEST_BYTES = 1 << 20
"""A fact takes a few hundred bytes; one that names 16,384 ranks 100 KiB."""


class Lines:
    """Reads a file block by block.

    Attributes:
        rest: What follows the last newline so far; empty where it is longer than a line may be.
        end: Where the last line that was handed out ended, in bytes from the file's beginning.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._dropping = False
        self.rest = b""
        self.end = file.tell()

    def block(self, most_bytes: int = BLOCK_BYTES) -> list[bytes] | None:
        """The lines that the next bytes complete, without newlines; None at the file's end.

        Of a line that is longer than `LONGEST_BYTES`, an empty one is left. Zeros before a line, as
        NFS shows them where bytes of another client are under way, count as no length.
        """
        block = self._file.read(most_bytes)
        if not block:
            return None
        if block[0] == 0 and not block.strip(b"\0"):
            skip_hole(self._file)
            block = b"" if not self.rest else block
        *lines, rest = (self.rest + block).split(b"\n")
        if lines:
            self.end = self._file.tell() - len(rest)
            if self._dropping:
                lines[0], self._dropping = b"", False
        rest = rest.lstrip(b"\0")
        if self._dropping or len(rest) > LONGEST_BYTES:
            self._dropping, rest = True, b""
        self.rest = rest
        return lines
