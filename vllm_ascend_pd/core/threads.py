# SPDX-License-Identifier: Apache-2.0
"""Debug check that only the thread that owns an object calls it.

`VLLM_ASCEND_PD_CHECK_THREADS=1` turns the check on, as in all tests. Otherwise no method is wrapped.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

CHECKED = os.environ.get("VLLM_ASCEND_PD_CHECK_THREADS") == "1"

_OWNER = "_owner_thread"

_Method = TypeVar("_Method", bound=Callable[..., Any])


class WrongThreadError(AssertionError):
    """A thread called an object that another thread owns."""


def owned(method: _Method) -> _Method:
    """Marks a method that only the object's owner calls. The first thread that calls one becomes the owner."""
    if not CHECKED:
        return method

    @functools.wraps(method)
    def checked(self: object, *args: Any, **kwargs: Any) -> Any:
        check_owner(self, method.__qualname__)
        return method(self, *args, **kwargs)

    return cast(_Method, checked)


def check_owner(thing: object, action: str) -> None:
    """Raises WrongThreadError, which names `action`, unless this thread owns `thing` (which needs a `__dict__`)."""
    thread = threading.current_thread()
    owner = vars(thing).setdefault(_OWNER, thread)  # atomic
    if owner is not thread:
        raise WrongThreadError(f"{action} runs on {thread.name}, but {owner.name} owns the {type(thing).__name__}")
