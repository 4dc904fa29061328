"""The host memory that calls of a compiled cell leave behind, by glibc's own count: exact where RSS is noise."""

import ctypes
import gc

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def bytes_in_use():
    """Bytes that malloc has given out."""
    gc.collect()
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def bytes_per_call(call, warm=40, calls=200):
    """Call so often and return how much memory each call has kept."""
    for _ in range(warm):
        call()
    before = bytes_in_use()
    for _ in range(calls):
        call()
    return (bytes_in_use() - before) / calls
