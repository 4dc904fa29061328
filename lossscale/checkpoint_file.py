"""Is a file of MindSpore's checkpoint format whole?"""

from pathlib import Path
from typing import Optional

_TAG = 0x0A  # the first field, of a length that follows


def cut_off_at(path: Path) -> Optional[str]:
    """Return what a file of MindSpore's checkpoint format breaks off at, None if it ends with its checksum.

    The format is a row of protobuf records, each ``0x0A, varint length, (0x0A, varint length, name), value``, and
    then ``crc_num`` and ten bytes. MindSpore itself reads a file that ends between two records as a smaller one.
    """
    content = memoryview(path.read_bytes())
    position, name = 0, "its start"
    while position < len(content) and bytes(content[position : position + 7]) != b"crc_num":
        try:
            if content[position] != _TAG or content[position + 1] == 0:
                return f"{name} or behind it"
            length, start = _varint(content, position + 1)
            if content[start] != _TAG:
                return f"{name} or behind it"
            name_length, name_start = _varint(content, start + 1)
            name = repr(bytes(content[name_start : name_start + name_length]).decode())
        except (IndexError, UnicodeDecodeError):
            return f"{name} or behind it"
        position = start + length
        if position > len(content):
            return name
    return None if position + 17 == len(content) else f"{name} or behind it"


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    """Return a number of protobuf's variable length, and the position behind it."""
    value = shift = 0
    while content[position] & 0x80:
        if shift > 56:
            raise IndexError("no number of protobuf is longer than ten bytes")
        value |= (content[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
    return value | content[position] << shift, position + 1
