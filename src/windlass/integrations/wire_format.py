"""Protocol-buffer messages as numbered fields, and the checksum of TensorBoard's record files.

Event files and W&B's offline files use few fields of large schemas. Reading those fields by number
needs no generated code and no package. Source: protobuf.dev/programming-guides/encoding.
"""

import struct
from collections.abc import Iterator

from windlass.errors import RecordError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DOUBLE = struct.Struct("<d")
_MAX_VARINT_BITS = 70
_CASTAGNOLI = 0x82F63B78
"""The polynomial of CRC-32C, reflected."""
_MASK = 0xA282EAD8
"""Added to a rotated checksum that lies beside its data.
Source: TensorFlow, `lib/hash/crc32c.h`."""

FieldValue = int | bytes
"""A varint as it stands, or the bytes of any other field."""


def read_fields(message: bytes) -> Iterator[tuple[int, FieldValue]]:
    """Number and value of each field of a message, in the order in which they stand.

    Raises:
        RecordError: the message ends within a field, or has a wire type that is no longer used.
    """
    offset = 0
    while offset < len(message):
        tag, offset = read_varint(message, offset)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, offset = read_varint(message, offset)
            yield number, value
            continue
        if wire_type == _BYTES:
            size, offset = read_varint(message, offset)
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise RecordError(f"field {number} has the wire type {wire_type}, which none should")
        if offset + size > len(message):
            raise RecordError(f"the message ends within its field {number}")
        yield number, message[offset : offset + size]
        offset += size


def read_varint(content: bytes, offset: int) -> tuple[int, int]:
    """An unsigned number of variable length, and the offset behind it.

    Raises:
        RecordError: the content ends within it, or it has more than 64 bits.
    """
    value = shift = 0
    while shift < _MAX_VARINT_BITS and offset < len(content):
        byte = content[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
    raise RecordError("a number of variable length has no end")


def signed(value: FieldValue) -> int:
    """A varint read as a signed number of 64 bits; 0 for a field of another wire type."""
    if not isinstance(value, int):
        return 0
    return (value & (1 << 64) - 1) - (1 << 64 if value >> 63 & 1 else 0)


def text(value: FieldValue) -> str:
    """The text of a field; bytes that are not UTF-8 are replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def field(number: int, value: float | bytes | str) -> bytes:
    """One field: an int as a varint, a float as a double, bytes and text with their length."""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value & (1 << 64) - 1)
    if isinstance(value, float):
        return _varint(number << 3 | _FIXED64) + _DOUBLE.pack(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


def masked_crc32c(content: bytes) -> int:
    """The checksum that TensorFlow's record files keep beside each length and each record."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()
