# SPDX-License-Identifier: Apache-2.0
"""Messages with a value in every field, as this release sends them. test_protocol.py compares them with what is kept.

`python tests/unit/wire_messages.py` adds to `tests/unit/data/wire` those that differ from what earlier releases sent.
Nothing that is there changes: later releases must read it.
"""

import json
from pathlib import Path

import msgspec

from harness.tickets import ticket_with
from vllm_ascend_pd.connector.bootstrap_server import answer_of
from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry, Order, Packing, RankCaches, TokenShare
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.protocol import (
    PROTOCOL_VERSION,
    Acknowledged,
    AskTicket,
    Connects,
    Describe,
    EngineDescription,
    EngineKind,
    Granted,
    GrantRefused,
    GrantRequest,
    Message,
    OfferTicket,
    Problem,
    RankDescription,
    ReleasePrompt,
    Revoke,
    TicketRefused,
    TicketTaken,
    TransferFailure,
    TransportInfo,
    WaitingAnswer,
    WaitingQuestion,
    WriteReport,
    WriterId,
    encode,
)
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signing import signed
from vllm_ascend_pd.core.topology import Sharding

WIRE = Path(__file__).parent / "data" / "wire"
BODIES = WIRE / "bodies.json"
SEQ = 7
SECRET = Secret([b"a secret for tests of the wire's format"])

ID, DIGEST = "0123456789abcdef" * 2, "fedcba9876543210" * 2
_PROMPT = PromptDigest(
    tokens=DIGEST, media=DIGEST, media_hashing=DIGEST, num_media=2, embeddings=DIGEST, adapter="adapter", salt=DIGEST
)
TICKET = signed(
    ticket_with(
        request_id="cmpl-0",
        do_remote_prefill=True,
        do_remote_decode=False,
        token_ids=[1, 2, 3],
        remote_pcp_size=2,
        remote_dcp_size=2,
        remote_interleave_size=8,
        remote_cached_tokens=16,
        remote_draft="eagle3",
        checksum_form=3,
        ticket_id=ID,
        prompt=_PROMPT,
        replaces=DIGEST,
    ),
    SECRET,
    expires_at=1_800_000_000,
)
_WRITER = WriterId("prefill-0", 1, 3, 2**62)
_CACHES = RankCaches(
    (
        Geometry(0, Order.TOKEN_MAJOR, "bfloat16", 128, 65536, 2, 8, 256, share=TokenShare(2, 1, 128), draft="eagle3"),
        Geometry(1, Order.HEAD_MAJOR, "int8", 128, 16384, 1, 1, 128, packing=Packing.INT8_NZ),
        Geometry(2, Order.HEAD_MAJOR, "bfloat16", 1, 4096, 1, 4, 1024, BlockKind.STATE),
        Geometry(3, Order.TOKEN_MAJOR, "bfloat16", 128, 4096, 1, 1, 128, tokens_per_entry=4, copied=True),
    ),
    tuple(
        CacheTensor(f"model.layers.{n}.attn", n % 2, 2**47 + n * 2**30, 1000, n, DIGEST if n == 1 else "")
        for n in range(4)
    ),
)
_TRANSPORT = TransportInfo("ascend", "mooncake-transfer-engine-npu 0.3.13.post1", EngineKind.COMM, Connects.BEFORE)

MESSAGES: list[Message] = [
    Describe("decode-0"),
    EngineDescription(
        "decode-0",
        "llama",
        4,
        2,
        (RankDescription(1, 3, "tcp://10.0.0.1:5555", "10.0.0.1:7777", _CACHES, _TRANSPORT),),
        dcp=2,
        interleave=128,
        settings={"rope_theta": "10000"},
    ),
    GrantRequest(ID, DIGEST, _WRITER, Sharding(4, (0, 0, 1, 1), 128), (0, 2), 5.0, "eagle3", "0123456789abcdef"),
    Granted(10.0),
    GrantRefused("the ticket is not known", retry=True),
    WriteReport(ID, _WRITER, "the write failed", 2**40, 2**39, 2.5, DIGEST, 2**20, b"12345678"),
    Acknowledged(),
    Revoke(ID, _WRITER, "the request was aborted", DIGEST),
    Problem("malformed message"),
    OfferTicket("prefill-0", "xfer-0", TICKET),
    AskTicket("prefill-0", "xfer-0", ID),
    TicketTaken(),
    TicketRefused("too many tickets wait", retry=True),
    ReleasePrompt("prefill-0", "xfer-0", "decode computes the prompt", ID, 40, _PROMPT),
]

BODIES_SENT = {
    "Ticket": msgspec.json.encode(TICKET),
    "TransferFailure": msgspec.json.encode(TransferFailure("cmpl-0", ID, "the write failed", True, by_prefill=True)),
    "WaitingQuestion": msgspec.json.encode(WaitingQuestion([ID, DIGEST])),
    "WaitingAnswer": msgspec.json.encode(WaitingAnswer([ID])),
    "bootstrap": answer_of("prefill-0_dp0", "prefill-0_dp0-1a2b", "10.0.0.2", 6000, siblings=1, secret=SECRET),
}
"""JSON over HTTP, between decode and the metaserver, and from prefill's bootstrap server."""


def frames(version: int) -> list[tuple[str, object]]:
    """Frames that are kept of a version, in hexadecimal digits, and what each says."""
    path = WIRE / f"version-{version}.json"
    return [(frame, said) for frame, said in json.loads(path.read_text())] if path.exists() else []


def bodies() -> list[tuple[str, str]]:
    """JSON bodies that are kept, each with its kind."""
    return [(kind, body) for kind, body in json.loads(BODIES.read_text())] if BODIES.exists() else []


def _write(path: Path, entries: list) -> None:
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


def _record() -> None:
    kept = frames(PROTOCOL_VERSION)
    sent = [(encode(SEQ, message).hex(), json.loads(msgspec.json.encode(message))) for message in MESSAGES]
    _write(WIRE / f"version-{PROTOCOL_VERSION}.json", kept + [entry for entry in sent if entry[0] not in dict(kept)])
    have = bodies()
    now = [(kind, body.decode()) for kind, body in BODIES_SENT.items()]
    _write(BODIES, have + [entry for entry in now if entry not in have])


if __name__ == "__main__":
    _record()
