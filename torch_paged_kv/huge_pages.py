"""Asks Linux for 2 MiB pages under a pool's memory: blocks lie far apart, and each would miss the TLB otherwise."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


def advise(tensor: Tensor) -> Tensor:
    """Ask for huge pages under CPU memory that nothing has written yet, where a whole one fits.

    A hint: where ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``never``, or on another system, nothing changes.

    Args:
        tensor: contiguous, of any shape and dtype.

    Returns:
        The same tensor.
    """
    is_memory = type(tensor) is Tensor and tensor.device.type == "cpu"  # not a fake one
    if sys.platform == "linux" and is_memory and tensor.nbytes >= HUGE_PAGE:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)
    return tensor
