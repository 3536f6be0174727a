# SPDX-License-Identifier: Apache-2.0
"""Patch of vLLM 0.33 with `--enable-fault-tolerance`: transfers of steps that were lost end, too.

When a step fails, vLLM aborts all requests and waits for an operator's `retry`. Then it ends the steps on their way,
and goes on. It keeps what ranks report if only the step's output fails. A rank that failed earlier has taken its
reports and loses them, or has not heard what the step told it. Blocks of these transfers would never be freed.

Nor would blocks that decode's scheduler frees when the steps on their way have ended: it counts those that were lost as
on their way for ever.

With the patch, after the last step on its way has ended, the ranks' counts begin anew and the connector has each rank
report again (`ConnectorRole.steps_lost`). No request finds KV in the prefix cache that a lost step was to compute: vLLM
caches blocks when it schedules a step.

A retry fails if a rank cannot exchange or write KV any more: vLLM makes its own communicators anew, and not this
connector's. It also fails if ranks that exchange KV have not heard of the same steps: each would get what is of another
step from then on. Then the engine stays unhealthy, and ends after `engine_recovery_timeout_sec`.

vLLM runs this on the thread that takes the operator's commands, while the scheduler's thread waits.
"""

from typing import Any

from vllm_ascend_pd.connector.patches import Method, replace


def fits() -> bool:
    """Whether vLLM can go on after a fault, and ends the steps on their way before. Imports vLLM's engine."""
    try:
        from vllm.v1.fault_tolerance import EngineCoreSentinel
    except ImportError:  # 0.23
        return False
    return hasattr(EngineCoreSentinel, "_drain_batch_queue")


def install() -> None:
    """Patches the loaded vLLM. May be called again."""
    from vllm.v1.fault_tolerance import EngineCoreSentinel

    replace(EngineCoreSentinel, "_drain_batch_queue", _with_lost_steps)


def _with_lost_steps(by_vllm: Method) -> Method:
    def drain_batch_queue(self: Any) -> None:
        """Raises RuntimeError if a rank needs a restart. vLLM answers the operator's command with it."""
        by_vllm(self)
        executor, scheduler = self.engine.model_executor, self.engine.scheduler
        ranks = executor.collective_rpc(state_of_rank)
        reason = next((failure for failure, _ in ranks if failure is not None), None)
        if reason is None and len({steps for _, steps in ranks}) > 1:
            reason = "a rank has missed a step in which others exchanged KV"
        if reason is not None:
            raise RuntimeError(f"restart this engine: {reason}")
        executor.init_kv_output_aggregator(scheduler.connector)
        scheduler.processed_step_seq = scheduler.sched_step_seq
        scheduler._drain_deferred_frees()
        scheduler.connector.steps_lost()

    return drain_batch_queue


def state_of_rank(worker: Any) -> tuple[str | None, int]:
    """Runs in a worker. Returns `ConnectorRole.failure` and `ConnectorRole.exchanged_steps` of its rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    role = get_kv_transfer_group().role
    return role.failure, role.exchanged_steps
