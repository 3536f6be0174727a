# SPDX-License-Identifier: Apache-2.0
"""Debug check that only the thread that owns an object calls it.

`VLLM_ASCEND_PD_CHECK_THREADS=1` turns the check on, as in all tests. Otherwise nothing is wrapped and nothing is checked.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

CHECKED = os.environ.get("VLLM_ASCEND_PD_CHECK_THREADS") == "1"

_OWNER = "_owner_thread"

_Self = TypeVar("_Self")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class WrongThreadError(AssertionError):
    """A thread called an object that another thread owns."""


def owned(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Marks a method that only the object's owner calls. The first thread that calls one becomes the owner."""
    if not CHECKED:
        return method

    @functools.wraps(method)
    def checked(self: _Self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        check_owner(self, method.__qualname__)
        return method(self, *args, **kwargs)

    return checked


def check_owner(thing: object, action: str) -> None:
    """Raises WrongThreadError unless this thread owns `thing`, which must have a `__dict__`. `action`: for the error."""
    thread = threading.current_thread()
    owner = vars(thing).setdefault(_OWNER, thread)  # atomic
    if owner is not thread:
        raise WrongThreadError(f"{action} runs on {thread.name}, but {owner.name} owns the {type(thing).__name__}")


def hand_over(thing: object) -> None:
    """The next thread that calls an `owned` method becomes the owner. Only for a thread that stops using `thing`."""
    vars(thing).pop(_OWNER, None)
