# SPDX-License-Identifier: Apache-2.0
"""Logs which layers reached the connector by vLLM's hooks, and which only at the step's end."""

import sys

from vllm_ascend_pd.prefill.worker import PrefillWorker


def say_what_was_saved() -> None:
    """Makes every step that sends something end with such a line."""
    end_step = PrefillWorker.end_step

    def say_and_end(worker: PrefillWorker) -> None:
        if worker._plan.sends:
            layers = len(worker._caches.layers)
            print(f"saved {layers - len(worker._plan.unpushed)} of {layers} layers", file=sys.stderr, flush=True)
        end_step(worker)

    PrefillWorker.end_step = say_and_end  # type: ignore[method-assign]
