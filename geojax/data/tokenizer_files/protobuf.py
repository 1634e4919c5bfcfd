"""Messages of protocol buffers, as fields in the order in which they were written."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


class DamagedMessageError(ValueError):
    """The bytes are no message, or a message that was cut off."""


class Field(NamedTuple):
    """A field of a message."""

    number: int
    value: int | bytes
    """An integer, or the bytes of a string, of a message or of a float."""

    @property
    def integer(self) -> int:
        """The value of an integer field.

        Raises:
            DamagedMessageError: it has another type.
        """
        if not isinstance(self.value, int):
            raise DamagedMessageError(f"field {self.number} is no integer")
        return self.value

    @property
    def bytes(self) -> bytes:
        """The value of a field of bytes.

        Raises:
            DamagedMessageError: it has another type.
        """
        if not isinstance(self.value, bytes):
            raise DamagedMessageError(f"field {self.number} holds no bytes")
        return self.value

    @property
    def text(self) -> str:
        """The value of a string field.

        Raises:
            DamagedMessageError: it has another type, or is not UTF-8.
        """
        try:
            return self.bytes.decode()
        except UnicodeDecodeError:
            raise DamagedMessageError(f"field {self.number} is not UTF-8") from None

    @property
    def float(self) -> float:
        """The value of a float field of 32 bits.

        Raises:
            DamagedMessageError: it has another type.
        """
        if len(self.bytes) != 4:
            raise DamagedMessageError(f"field {self.number} is no float")
        (number,) = struct.unpack("<f", self.bytes)
        return float(number)


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message.

    Raises:
        DamagedMessageError: the message is cut off or is none.
    """
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield Field(number, value)
            continue
        if kind == _BYTES:
            size, position = _varint(message, position)
        elif kind in (_FIXED_32, _FIXED_64):
            size = 4 if kind == _FIXED_32 else 8
        else:
            raise DamagedMessageError(f"a field of the unknown type {kind} at byte {position:,}")
        if number == 0 or position + size > len(message):
            raise DamagedMessageError(f"it ends within a field at byte {position:,}")
        yield Field(number, message[position : position + size])
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the integer at `position`, and the position after it."""
    value = 0
    for count, byte in enumerate(message[position : position + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    raise DamagedMessageError(f"it ends within a number at byte {position:,}")
