# SPDX-License-Identifier: Apache-2.0
import ctypes

_runtime = ctypes.CDLL("libascendcl.so")


def memcpy(to: int, room: int, source: int, nbytes: int, kind: int) -> int:
    return _runtime.aclrtMemcpy(
        ctypes.c_void_p(to), ctypes.c_size_t(room), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), kind
    )


def get_mem_info(attribute: int = 1) -> tuple[int, int, int]:
    """Free bytes, total bytes, error code."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    code = _runtime.aclrtGetMemInfo(attribute, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value, code
