# SPDX-License-Identifier: Apache-2.0
"""`kv_connector_extra_config`, parsed and checked once.

Every key has a default that works. An unknown key or a value of the wrong type is an error that names it. The strings
below the fields are the reference of docs/configuration.md (`scripts/config_reference.py`).
"""

import difflib
import sys
from typing import Annotated, Any, Literal

import msgspec

from vllm_ascend_pd.core.hosts import HostList

CONNECTOR = "LayerwisePushConnector"
"""The connector's name in `kv_transfer_config`."""


class ConfigError(ValueError):
    """A `kv_transfer_config` this connector cannot work with."""


_SECRET = "a cluster has one secret: `vllm-ascend-pd secret` makes it, and secret_file or the default path names it"
REMOVED = {
    "control_timeout_s": "an answer on the side channel is waited for 5 s",
    "decode_allowlist": "`peers` names the engines' hosts, decode's and prefill's alike",
    "grant_timeout_s": "a prefill rank asks for a grant for 20 s",
    "idle_wait_s": "a step that computes nothing waits for transfers for 0.05 s",
    "max_batch_bytes": "a batch of the transfer engine has 64 MiB over TCP, otherwise 1 GiB",
    "max_batch_descriptors": "a batch of the transfer engine has 2048 copies over TCP, otherwise 8192",
    "max_pending_tickets": "4096 tickets may wait for an answer",
    "metaserver_allowlist": "`peers` names the URLs of metaservers; with a secret, our proxy needs no entry",
    "metaserver_connect_timeout_s": "connecting to a metaserver takes 5 s at most",
    "metaserver_max_connections": "there are 256 connections to metaservers",
    "metaserver_retries": "a ticket is posted again 5 times, which takes 1.5 to 3 s",
    "prefill_allowlist": "`peers` names the engines' hosts, decode's and prefill's alike",
    "push_queue_size": "4096 layers may wait to be sent to a decode engine",
    "settle_timeout_s": "a ticket that nobody writes for stays open for 30 s after prefill has ended",
    "side_channel_key_file": _SECRET,
    "ticket_secret_file": _SECRET,
    "trace_max_bytes": "a trace file ends at 64 MiB",
}
"""Keys of earlier versions, each with what holds instead."""

# Upper bounds: what the messages that carry these times (or multiples of them) allow.
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_UpToADay = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_LeaseSeconds = Annotated[float, msgspec.Meta(ge=1, le=86400)]
_WriteSeconds = Annotated[float, msgspec.Meta(gt=0, le=600)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Positive = Annotated[int, msgspec.Meta(gt=0)]
_NotNegative = Annotated[int, msgspec.Meta(ge=0)]
_Port = Annotated[int, msgspec.Meta(gt=0, le=65535)]


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TLS to the metaserver, with vllm-ascend's names. Paths name PEM files. Used only with `ssl_enable`."""

    ssl_enable: bool = False
    """Whether the other keys are used."""
    ssl_certfile: str | None = None
    """This engine's certificate, for mutual TLS."""
    ssl_keyfile: str | None = None
    """Its key."""
    ssl_keyfile_password: str | None = None
    """The key's password. Prefer a file: vLLM prints this configuration."""
    ssl_ca_certs: str | None = None
    """The authority that signed the metaserver's certificate."""
    ssl_keyfile_password_file: str | None = None
    """File with the key's password, of mode 0600."""

    def __post_init__(self) -> None:
        if not self.ssl_enable and (self.ssl_certfile or self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("`tls_config` names files, but `ssl_enable` is not true")
        if self.ssl_keyfile_password is not None and self.ssl_keyfile_password_file is not None:
            raise ValueError("`tls_config` has a password and a file with one: which?")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("`tls_config` has `ssl_keyfile` without `ssl_certfile`")

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "ssl_keyfile_password")
        return f"TlsConfig({', '.join(shown)})"


class UserConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user sets. Times are seconds, sizes bytes. Files with secrets must be regular files of mode 0600."""

    transfer_timeout_s: _Seconds = 480.0
    """Longest time from prefill's first request for a grant until the KV has arrived. Time in a queue for prefill does
    not count while the proxy says that the ticket waits."""
    queue_timeout_s: _UpToADay = 3600.0
    """Longest time from issuing a ticket until prefill begins: in the proxy's queue and in prefill's queue. Also
    the longest time that a prompt which prefill has [computed first](design.md#long-prompts) waits for decode's memory.
    A signed ticket expires after this time. At most a day."""
    lease_s: _LeaseSeconds = 20.0
    """How long a grant lasts unless it is renewed. With the time that a write takes to settle, it bounds how long
    decode keeps the blocks of a prefill process that has ended. If its host has died, it may take
    [longer](design.md#fencing). 1 to 86,400."""
    write_timeout_s: _WriteSeconds = 10.0
    """Longest time that one batch of the transfer engine may take, and that prefill waits for what batches hold. At
    most 600. Over `ascend` a batch may take the time that RoCE needs to repair a link, if that is longer (34 s)."""
    collective_timeout_s: _Seconds = 60.0
    """Longest time of one all-to-all. After a longer one the engine must be restarted. Keep it above what a rank
    may wait for a staging slot while others have begun: 7 s and, over TCP, four times `write_timeout_s`."""
    hold_timeout_s: _UpToADay | None = None
    """Longest time that a computed prompt keeps its blocks on prefill until decode's ticket comes, or decode asks about
    it: behind a router that asks prefill first, or with `prefill_first_tokens`, then 60 s at most, because decode asks
    every 5 s. At most a day. None: 480 s. In a MultiConnector, None means that no such prompts are kept."""
    bootstrap_port: _Port | None = None
    """Port where prefill tells routers for MooncakeConnector its engine id (routers.md). None: what the environment
    variable VLLM_MOONCAKE_BOOTSTRAP_PORT says, or no such port."""
    staging_slots: _Positive | None = None
    """Number of buffers for regrouped layers, each for one layer of one step's tokens. None: 4, or 2 where a step may
    have more than 8192 tokens."""
    secret_file: str | None = None
    """File with the cluster's secret (`vllm-ascend-pd secret`). It encrypts the side channel and signs tickets, and
    engines without it get no answer. The same on all engines and proxies. None: `~/.config/vllm-ascend-pd/secret`, or
    below `XDG_CONFIG_HOME` if that is set, if a file is there."""
    peers: tuple[str, ...] = ()
    """Engines and metaservers that are talked to. An engine's host is an address, a network or a name, with a port or a
    range of ports if wanted (`10.1.0.0/16`, `10.1.0.0/16:7000-7999`, `[fd00::/8]:8998`, `node-3`). If any host is
    listed, only listed hosts connect and are connected to. The ports are those that tickets, routers and clients name
    (`kv_port`, `bootstrap_port`, the ticket listener's). Ports that ranks choose are free. A URL
    (`scheme://host[:port][/path]`) admits a metaserver that does not sign. Empty: with a secret, all engines that have
    it; otherwise this host, and with `trust_network` private networks and the networks of this host's interfaces.
    Without a URL, tickets are posted to metaservers that have the secret; without a secret only to this host, path
    `/v1/metaserver`."""
    trust_network: bool = False
    """Without a secret, start although other hosts can reach this engine. Whoever reaches it is trusted."""
    metaserver_token_file: str | None = None
    """File with the bearer token sent to the metaserver."""
    transfer_protocol: str | None = None
    """Mooncake's protocol: `tcp`, `rdma` or `ascend`. None: `tcp` on CPU and `ascend` on NPU. The same on prefill and
    decode. Mooncake for NPUs has `tcp` from 0.3.13.post1 on."""
    prefill_first_tokens: _NotNegative | Literal["auto"] | None = "auto"
    """Prompts of which prefill computes more tokens than this are computed before decode gives them memory, so that
    memory does not wait for prefill. Shorter prompts get memory first, and are sent while they are computed. `auto`: a
    step of prefill, its `--max-num-batched-tokens`, less the tokens that prefill computes before, for requests of our
    proxy, if all prefill engines that are well [can hold such prompts](design.md#long-prompts). A number holds whether
    they can or not: where they cannot, requests fail. None: all prompts get memory first. Read by decode. A number
    needs our proxy, too, and `hold_timeout_s` on prefill engines with a MultiConnector."""
    who_computes: Literal["auto", "prefill", "never"] = "auto"
    """Who computes prompts, or what decode has not cached of them. `auto`: decode computes those that it computes
    sooner than prefill would. `prefill`: prefill computes all, unless a request asks for decode. `never`: decode
    computes none, not even that of a preempted request. Read by decode, as are the next three."""
    decode_prompt_tokens: _NotNegative | None = None
    """With `auto`: the most tokens of a prompt, beyond decode's cache, that decode computes. None: tuned by measuring.
    """
    decode_prompt_share: _Share = 0.1
    """The largest share of its time that decode spends on prompts while it generates for other requests. 0 to 1."""
    max_decode_prompt_tokens: _NotNegative = 16384
    """Most tokens of a prompt, beyond decode's cache, that decode computes if the request asks for it, or if no prefill
    engine is well. 0: none."""
    allow_other_model: bool = False
    """Accept KV of another model. **Answers may be wrong without any sign.** For checkpoints that differ although you
    know that they mean the same. On prefill it allows other settings, and images, sounds and videos that cannot be
    compared with decode's. On decode it allows other weights. Shapes and cache data types must still be equal."""
    verify_kv: Literal["off", "all"] | _Share = "off"
    """Which requests' KV is compared with what prefill computed ([garbled.md](garbled.md)): `off`, `all`, or a share of
    them from 0 to 1. The smaller share of prefill and decode counts. A request whose KV differs fails, or decode
    computes it (`kv_load_failure_policy`)."""
    prefill: dict[str, Any] | None = None
    """Parallel sizes of prefill engines, as vllm-ascend's connector needs them and vllm-ascend checks them. This
    connector discovers sizes, and does not read these."""
    decode: dict[str, Any] | None = None
    """The same of decode engines."""
    ascend_local_comm_res_path: str | None = None
    """Folder with the network endpoints of A5 NPUs. vllm-ascend's workers read it."""
    tls_config: TlsConfig | None = None
    """TLS to a metaserver behind `https://`, with vllm-ascend's names."""
    trace_dir: str | None = None
    """Folder for trace files (`vllm-ascend-pd timeline`, Perfetto) and dumps of `verify_kv`. None: neither."""

    @property
    def verified_share(self) -> float:
        """The share of requests whose KV is verified."""
        return float({"off": 0.0, "all": 1.0}.get(self.verify_kv, self.verify_kv))  # type: ignore[arg-type]

    def slots(self, step_tokens: int) -> int:
        """Staging slots where steps have at most so many tokens: how many layers the sending may be behind."""
        # What takes longer to compute varies less in how long it takes: a layer ahead is enough.
        return self.staging_slots or (4 if step_tokens <= 8192 else 2)

    @property
    def peer_hosts(self) -> tuple[str, ...]:
        """The entries of `peers` that admit engines."""
        return tuple(entry for entry in self.peers if "://" not in entry)

    @property
    def peer_urls(self) -> tuple[str, ...]:
        """The entries of `peers` that admit metaservers."""
        return tuple(entry for entry in self.peers if "://" in entry)

    def __post_init__(self) -> None:
        try:
            HostList(self.peer_hosts, "")
        except ValueError as error:
            raise ValueError(f"`peers`: {error}") from None


class ConnectorConfig(UserConfig, frozen=True):
    """What a user sets, and what is the same for all users. Only tests change the latter."""

    # How long a ticket that nobody writes for may stay open after prefill has ended. A prefill rank has all this time
    # to ask for a grant, so it is longer than `grant_timeout_s`.
    settle_timeout_s: float = 30.0
    # How long a prefill rank asks for a grant before it gives the ticket up. A decode rank answers "not yet" while
    # earlier steps use the blocks, or while it loads weights. Where the prefill rank regroups KV, it stops sooner if
    # another request needs the staging slot.
    grant_timeout_s: float = 20.0
    # Longest wait for an answer on the side channel. Answers take milliseconds, but a process on a busy host may stand
    # still for seconds. A lease is renewed after a third. If that answer is lost, there is time to ask again before the
    # lease ends, unless `lease_s` is below 7.5 s.
    control_timeout_s: float = 5.0
    # Longest time that a step with nothing to compute waits for transfers before it returns. New requests wait for the
    # step to return, so it is small beside the time of a prompt.
    idle_wait_s: float = 0.05
    # Most layers that wait to be sent to one decode engine: a step of the deepest models, many times over. Further ones
    # make the step wait.
    push_queue_size: int = 4096
    # To open a connection to a metaserver, and once more for its TLS handshake.
    metaserver_connect_timeout_s: float = 5.0
    # Posts of tickets that have a connection at a time. Further ones wait.
    metaserver_max_connections: int = 256
    # How often a ticket is posted again. The pauses take 1.5 to 3.1 s, longer than a proxy's restart.
    metaserver_retries: int = 5


_ALIKE = 0.65
"""How alike two names are, by difflib's measure, if one may be a misspelling of the other."""


def parse_config(extra: dict[str, Any]) -> ConnectorConfig:
    """Raises ConfigError, which names the key. If it is unknown, it also says what replaces it, or names a known one
    that is spelled much like it."""
    known = UserConfig.__struct_fields__
    for key in extra:
        if key in REMOVED:
            raise ConfigError(f"kv_connector_extra_config: there is no key `{key}` any more: {REMOVED[key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)
            meant = f"did you mean `{near[0]}`?" if near else "docs/configuration.md lists all"
            raise ConfigError(f"kv_connector_extra_config: unknown key `{key}`; {meant}")
    try:
        return msgspec.convert(extra, ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
