# SPDX-License-Identifier: Apache-2.0
"""Engine configurations for vllm-ascend, on NPUs or on emulated ones."""

import dataclasses

import cann_on_host
from harness import ascend
from harness.clusters import FAULTS, ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role
from harness.models import TINY, ModelSpec


def on_npu(config: EngineConfig, first_device: int = 0) -> EngineConfig:
    if cann_on_host.is_active():
        return ascend.emulated(config)
    env = ascend.engine_env(first_device, config.tp * config.pp * config.dp)
    return dataclasses.replace(config, device="npu", env=(*env.items(), *config.env))


def one_to_one(
    name: str,
    prefill_tp: int,
    decode_tp: int,
    prefill_pp: int = 1,
    args: tuple[str, ...] = (),
    model: ModelSpec = TINY,
) -> ClusterConfig:
    prefill = EngineConfig(Role.PREFILL, tp=prefill_tp, pp=prefill_pp, args=args, env=FAULTS, connector_extra=PATIENT)
    decode = EngineConfig(Role.DECODE, tp=decode_tp, args=args, connector_extra=PATIENT)
    return ClusterConfig(
        name,
        prefill=(on_npu(prefill),),
        decode=(on_npu(decode, first_device=prefill_tp * prefill_pp),),
        model=model,
    )
