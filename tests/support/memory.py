"""Arrays next to unmapped memory, or in memory that cannot be written."""

import ctypes
import mmap

import numpy as np


def before_an_unreadable_page(x):
    """Copy the array so that the next byte after it cannot be read."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    array = np.frombuffer(memory, np.uint8, x.nbytes, size - x.nbytes).view(x.dtype)
    array.reshape(x.shape)[...] = x
    return array.reshape(x.shape)


def after_an_unreadable_page(x):
    """Copy the array so that the byte before it cannot be read."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, page + -(-x.nbytes // page) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0) == 0
    array = np.frombuffer(memory, np.uint8, x.nbytes, page).view(x.dtype).reshape(x.shape)
    array[...] = x
    return array


def read_only(x):
    """Return a read-only copy, because inputs are never written."""
    x = x.copy()
    x.setflags(write=False)
    return x
