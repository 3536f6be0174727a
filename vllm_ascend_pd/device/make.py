# SPDX-License-Identifier: Apache-2.0
"""Makes the device of this process."""

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.event import DeviceError


def make_device(device_type: str) -> Device:
    """The device of this process, of the kind that vLLM calls `device_type`. Raises `DeviceError` for other kinds."""
    if device_type == "npu":
        from vllm_ascend_pd.device.npu import NpuDevice

        return NpuDevice()
    if device_type == "cpu":
        from vllm_ascend_pd.device.cpu import CpuDevice

        return CpuDevice()
    raise DeviceError(f"vLLM runs on {device_type!r}; this connector supports npu and cpu")
