# SPDX-License-Identifier: Apache-2.0
"""Engine configurations for vllm-ascend, on NPUs or on emulated ones."""

import dataclasses
from collections.abc import Sequence

import cann_on_host
from harness import ascend
from harness.clusters import FAULTS, ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role
from harness.models import TINY, ModelSpec, for_npu


def on_npu(config: EngineConfig, first_device: int = 0) -> EngineConfig:
    if cann_on_host.is_active():
        return ascend.emulated(config, first_device)
    env = ascend.engine_env(first_device, config.tp * config.pp * config.dp)
    return dataclasses.replace(config, device="npu", dtype=ascend.DTYPE, env=(*env.items(), *config.env))


def cluster_of(
    name: str, prefill: Sequence[EngineConfig], decode: Sequence[EngineConfig], model: ModelSpec = TINY
) -> ClusterConfig:
    """Each engine on NPUs of its own, with a model like `model`."""
    configs = [*prefill, *decode]
    engines = tuple(map(on_npu, configs, ascend.first_devices(configs)))
    return ClusterConfig(name, engines[: len(prefill)], engines[len(prefill) :], model=for_npu(model))


def one_to_one(
    name: str,
    prefill_tp: int,
    decode_tp: int,
    prefill_pp: int = 1,
    args: tuple[str, ...] = (),
    model: ModelSpec = TINY,
    env: tuple[tuple[str, str], ...] = (),
) -> ClusterConfig:
    prefill = EngineConfig(
        Role.PREFILL,
        tp=prefill_tp,
        pp=prefill_pp,
        args=args,
        env=(*FAULTS, *env),
        connector_extra=PATIENT,
        bootstrap=True,
    )
    decode = EngineConfig(Role.DECODE, tp=decode_tp, args=args, env=env, connector_extra=PATIENT)
    return cluster_of(name, [prefill], [decode], model)
