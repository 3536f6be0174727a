# SPDX-License-Identifier: Apache-2.0
"""A cluster with a secret, whose decode engine also has certificates for mutual TLS. The test_security*.py share it."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

from zmq.utils import z85

from harness.certificates import Authority, Certificate
from harness.clusters import PATIENT_PROXY, ClusterConfig, one_to_one
from harness.engines import PATIENT, script
from vllm_ascend_pd.core.secret import Secret, Use
from vllm_ascend_pd.transport.secret_files import cluster_secret


@dataclasses.dataclass(frozen=True)
class Files:
    secret: Path
    authority: Authority
    proxy: Certificate
    decode: Certificate

    def cluster_secret(self) -> Secret:
        secret = cluster_secret(self.secret)
        assert secret is not None
        return secret

    def contents(self) -> list[str]:
        """What nobody may see: the secret, and all keys that follow from it."""
        keys = [key for use in Use for key in self.cluster_secret().keys(use)]
        forms = [key.hex() for key in keys] + [z85.encode(key).decode() for key in keys]
        return [self.secret.read_text().strip(), *forms]


def make_files(folder: Path) -> Files:
    """As an operator makes them."""
    authority = Authority(folder, "cluster")
    files = Files(
        folder / "secret",
        authority,
        authority.issue("proxy", "IP:127.0.0.1"),
        authority.issue("decode", "DNS:decode"),
    )
    make = [script("vllm-ascend-pd"), "secret", str(files.secret)]
    subprocess.run(make, check=True, timeout=60, capture_output=True)
    return files


class _Options(dict[str, object]):
    """Of a configuration, which must be hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def secured_cluster(files: Files) -> ClusterConfig:
    plain = one_to_one(2, 1)
    tls = _Options(
        ssl_enable=True,
        ssl_ca_certs=str(files.authority.cert),
        ssl_certfile=str(files.decode.cert),
        ssl_keyfile=str(files.decode.key),
    )

    def secure(side: Any, **more: object) -> Any:
        extra = (*PATIENT, ("secret_file", str(files.secret)), *more.items())
        return dataclasses.replace(side, connector_extra=extra)

    return dataclasses.replace(
        plain,
        name="secured-tp2-to-tp1",
        prefill=(secure(plain.prefill[0], peers=("127.0.0.0/8",)),),
        decode=(secure(plain.decode[0], tls_config=tls),),
        proxy_args=(*PATIENT_PROXY, "--secret-file", str(files.secret)),
    )
