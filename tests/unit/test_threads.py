# SPDX-License-Identifier: Apache-2.0
"""The check that only the owner of an object calls it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_ascend_pd.core import threads
from vllm_ascend_pd.core.threads import WrongThreadError, owned


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @owned
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count


def on_another_thread(counter: Counter) -> int:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as other:
        return other.submit(counter.add).result()


def test_the_check_is_on_in_all_tests() -> None:
    assert threads.CHECKED


def test_a_call_from_another_thread_fails() -> None:
    counter = Counter()
    assert counter.add(2) == 2
    with pytest.raises(WrongThreadError, match=r"Counter\.add runs on other_0, but MainThread owns the Counter"):
        on_another_thread(counter)
    assert counter.count == 2
