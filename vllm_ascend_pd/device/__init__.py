# SPDX-License-Identifier: Apache-2.0
"""What differs between devices: streams, events, buffers and collectives, behind one interface."""

from vllm_ascend_pd.device.base import Device, DeviceError, Event

__all__ = ["Device", "DeviceError", "Event", "make_device"]


def make_device(device_type: str) -> Device:
    """The device of this process, of the kind that vLLM calls `device_type`. Raises `DeviceError` for other kinds."""
    if device_type == "npu":
        from vllm_ascend_pd.device.npu import NpuDevice

        return NpuDevice()
    if device_type == "cpu":
        from vllm_ascend_pd.device.cpu import CpuDevice

        return CpuDevice()
    raise DeviceError(f"vLLM runs on {device_type!r}; this connector supports npu and cpu")
