# SPDX-License-Identifier: Apache-2.0
"""Stand-in for pyACL, CANN's Python binding: the functions that vllm-ascend calls."""

import ctypes

from . import rt as rt

_runtime = ctypes.CDLL("libascendcl.so")


def memcpy(to: int, room: int, source: int, nbytes: int, kind: int) -> int:
    return _runtime.aclrtMemcpy(
        ctypes.c_void_p(to), ctypes.c_size_t(room), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), kind
    )
