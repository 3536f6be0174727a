# SPDX-License-Identifier: Apache-2.0
"""Decides which addresses of prefill engines decode connects to. Requests name them, and clients write requests."""

from vllm_ascend_pd.core.signed_addresses import is_signed_listener
from vllm_ascend_pd.transport.peers import Peers

_NOT_SIGNED = (
    "no signature of prefill's came with the address: give prefill the secret that decode has, and hand on all that "
    "prefill answers, or name the address in decode's peers"
)
_WRONGLY_SIGNED = (
    "its signature is wrong: give prefill the secret that decode has, and hand on what prefill answers as it is, or "
    "name the address in decode's peers"
)
_BOOTSTRAP = "no prefill engine signs it, since the router names it: name host and port in decode's peers"


class PrefillAdmission:
    """Compares addresses with the signature that came with them, and with `peers`. Any thread may call it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        # The addresses in words, for logs.
        self.admitted = peers.named.admitted
        if peers.secret is not None:
            self.admitted = f"{peers.hosts.admitted} with a signature, {peers.named.admitted} without"

    def refusal_of_listener(
        self, engine_id: str, host: str, port: int, transfer_id: str | None, signature: str
    ) -> str | None:
        """Returns why tickets must not be offered at `host:port`; None if they may.

        `engine_id`, `transfer_id`: what prefill has signed with the address. `signature`: "" if none came with it.
        No reason quotes the address, since clients may read it.
        """
        secret, unnamed = self._peers.secret, self._peers.named.refusal(host, port)
        if unnamed is None or secret is None:
            return unnamed
        if not signature:
            return _NOT_SIGNED
        if not is_signed_listener(secret, signature, engine_id, host, port, transfer_id):
            return _WRONGLY_SIGNED
        return self._peers.hosts.refusal(host)  # the engine chose the port itself

    def refusal_of_bootstrap(self, host: str, port: int) -> str | None:
        """Returns why the bootstrap server at `host:port` must not be asked; None if it may. No reason quotes it."""
        unnamed = self._peers.named.refusal(host, port)
        return unnamed if unnamed is None or self._peers.secret is None else _BOOTSTRAP
