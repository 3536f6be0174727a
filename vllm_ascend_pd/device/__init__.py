# SPDX-License-Identifier: Apache-2.0
"""What differs between devices: streams, events, buffers and collectives, behind one interface."""

from vllm_ascend_pd.device.base import Device, DeviceError, Event

__all__ = ["Device", "DeviceError", "Event", "current_device"]


def current_device() -> Device:
    """The device that vLLM runs on in this process. Raises `DeviceError` for one that is not supported."""
    from vllm.platforms import current_platform

    if current_platform.device_type == "npu":
        from vllm_ascend_pd.device.npu import NpuDevice

        return NpuDevice()
    if current_platform.device_type == "cpu":
        from vllm_ascend_pd.device.cpu import CpuDevice

        return CpuDevice()
    raise DeviceError(f"vLLM runs on {current_platform.device_type!r}; this connector supports npu and cpu")
