# SPDX-License-Identifier: Apache-2.0
"""What vLLM detects on this machine, for tools, which do not import vLLM themselves."""


def load_connector() -> str:
    """Registers and loads the connector as vLLM does. Returns its class name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import vllm_ascend_pd

    vllm_ascend_pd.register()
    return str(KVConnectorFactory.get_connector_class_by_name("LayerwisePushConnector").__name__)


def device_type() -> str:
    """Returns the kind of device that vLLM uses in this process, such as "npu" or "cpu"."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def host_address() -> str:
    """Returns the address that vLLM has for this host. It may be that of all interfaces (0.0.0.0)."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
