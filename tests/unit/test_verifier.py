# SPDX-License-Identifier: Apache-2.0
"""What decode makes of prefill's checksums: wrong KV is named, and what was not compared counts as neither right nor
wrong. Both sides read one cache, which a test changes in between."""

import logging
import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from harness.tickets import ticket_with
from vllm_ascend_pd.core.caches import LayerTensors, describe
from vllm_ascend_pd.core.checksum import MAX_ROWS, Form, SummedUnits, Tallies, column_tokens, tensor_weights
from vllm_ascend_pd.core.kv_dump import read_dump
from vllm_ascend_pd.core.layout import LayerSpec
from vllm_ascend_pd.core.prefill_ticket import Destination
from vllm_ascend_pd.core.protocol import RankDescription, WriterId
from vllm_ascend_pd.core.step import Expect, VerifiedBlocks
from vllm_ascend_pd.core.topology import RankInfo, sharding
from vllm_ascend_pd.decode import checksums
from vllm_ascend_pd.decode.checksums import Delivered, Reported, Verifier
from vllm_ascend_pd.device.cpu import CpuDevice, CpuEvent
from vllm_ascend_pd.device.event import DeviceError
from vllm_ascend_pd.prefill import checksums as of_prefill
from vllm_ascend_pd.prefill.checksums import UNKNOWN, StepChecksums, report_checksums, submit_layer

# Of the prompt that `ticket_with` has.
BLOCK, TOKENS = 16, 40
HEADS, LAYERS = 4, 2
BLOCKS = [5, 2, 7]


class World:
    """A decode rank, and prefill ranks that share its heads and have computed a prompt of `TOKENS` tokens."""

    def __init__(self, device, prefill_tp=1, dump_dir=None, heads_first=False):
        self.device, self.prefill = device, sharding(prefill_tp)
        shape = (10, HEADS, BLOCK, 8) if heads_first else (10, BLOCK, HEADS, 8)
        caches = {f"layer {n}": tuple(torch.randn(shape) for _ in "KV") for n in range(LAYERS)}
        spec = LayerSpec(0, BLOCK, HEADS, HEADS)
        self.caches = describe(caches, dict.fromkeys(caches, spec), heads_first=heads_first)
        self.tensors = self.caches.tensors
        info = RankInfo("d", "m", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
        self.verifier = Verifier(info, device, self.caches, dump_dir)

    def ticket(self, **changes):
        return ticket_with(ticket_id=f"{random.getrandbits(128):032x}", remote_block_ids=[BLOCKS], **changes)

    def report(self, ticket, rank, grows=False):
        """What a prefill rank reports. It has computed its heads of all layers."""
        [geometry] = self.caches.description.geometries
        heads = self.prefill.heads(rank, HEADS)
        # All heads are summed here, and a rank's are reported.
        summed = SummedUnits.of(geometry, BLOCK, [(0, ticket.num_tokens)], [BLOCKS], [(BLOCKS, BLOCK)])
        described = self.caches.description.tensors
        names = {(each.layer, each.part) for each in described}
        step = StepChecksums(self.device, range(HEADS), summed, [ticket.ticket_id], names)
        for indices in self.caches.layers.values():
            tensors = LayerTensors(tuple(described[i] for i in indices), tuple(self.tensors[i] for i in indices))
            submit_layer(self.device, [(step, tensors)], {}, self.device.record_event()).wait(5)
        step.own_heads, step.taken = (
            heads,
            {name: sums[:, heads.start : heads.stop] for name, sums in step.taken.items()},
        )
        destination = Destination(RankDescription(0, 0, "", "", self.caches.description), self.covers)
        return report_checksums(ticket, [step], {"d": destination}, grows=grows)["d"]

    @property
    def covers(self):
        return tuple(range(len(self.tensors)))

    def delivered(self, ticket=None, reports=None):
        """The prompt's KV, with what prefill reports. `reports`: in place of that."""
        ticket = ticket or self.ticket()
        ranks = range(len(self.prefill.shares))
        reports = reports or [self.report(ticket, rank) for rank in ranks]
        blocks = VerifiedBlocks((BLOCKS,), TOKENS, column_tokens(ticket.spans, TOKENS))
        expect = Expect("r", ticket.ticket_id, ticket.digest(), BLOCKS, 0, blocks)
        reported = tuple(Reported(WriterId("p", 0, n, 1), self.covers, each) for n, each in enumerate(reports))
        return Delivered(expect, blocks, (0, 0), None, self.prefill, reported)

    def compare(self, delivered):
        """Returns the result, and why the request fails."""
        self.verifier.begin([delivered])
        [(_, reason)] = self.verifier.take(5.0)
        return self.verifier.take_counts(), reason


@pytest.fixture
def device():
    made = CpuDevice()
    yield made
    made.close()


@pytest.fixture
def world(device, tmp_path):
    return World(device, dump_dir=str(tmp_path))


RIGHT, WRONG, UNKNOWN_ = {"right": 1}, {"wrong": 1}, {"unknown": 1}


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2)], ids=["K and V", "two layers"])
def test_exchanged_tensors_are_named_with_their_block_and_dumped(world, tmp_path, one, other):
    delivered = world.delivered()
    block = world.tensors[one][BLOCKS[1]]
    kept = block.clone()
    block.copy_(world.tensors[other][BLOCKS[1]])
    world.tensors[other][BLOCKS[1]].copy_(kept)
    counts, reason = world.compare(delivered)
    assert counts == WRONG
    names = ["layer 0 tensor 0", "layer 0 tensor 1", "layer 1 tensor 0"]
    assert f"{names[one]}, {names[other]} in blocks {BLOCKS[1]}, from prefill rank 0 " in reason
    dump = read_dump(tmp_path / "verify-0.npz")
    assert np.array_equal(dump.words.reshape(-1), world.tensors[one][BLOCKS[1]].view(torch.int32).numpy().reshape(-1))


@pytest.mark.parametrize("fault", ["the work fails", "the device refuses the work"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_checksums_that_prefill_could_not_take_blame_nobody(world, monkeypatch, caplog, fault, layer):
    submit, submitted = world.device.submit, []

    def refuse(*args):
        submitted.append(args)
        if len(submitted) == layer + 1:
            raise DeviceError("refused by the test")
        return submit(*args)

    def fail(units):
        submitted.append(units)
        if len(submitted) == layer + 1:
            raise RuntimeError("refused by the test")
        return checksums.take_sums(units)

    owner, name, broken = (
        (of_prefill, "take_sums", fail) if fault == "the work fails" else (world.device, "submit", refuse)
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        delivered = world.delivered()
    assert [report.checksums for report in delivered.reports] == [UNKNOWN]
    assert f"no checksums of layer layer {layer}" in caplog.text
    assert "refused by the test" in caplog.text
    assert world.compare(delivered) == (UNKNOWN_, None)


def test_an_error_while_checksums_are_put_together_keeps_no_report_back(world, monkeypatch, caplog):
    monkeypatch.setattr(of_prefill, "to_numpy", lambda sums: 1 // 0)
    assert world.report(world.ticket(), 0) == UNKNOWN
    assert "ZeroDivisionError" in caplog.text


def other_format(report):
    return bytes([report[0] + 64, *report[1:]])


@pytest.mark.parametrize("silent", [lambda _: None, lambda _: UNKNOWN, other_format], ids=["none", "unknown", "format"])
@pytest.mark.parametrize(
    ("head", "result"), [(None, UNKNOWN_), (0, UNKNOWN_), (3, WRONG)], ids=["right", "its heads wrong", "others wrong"]
)
def test_a_request_is_not_right_if_one_writer_has_reported_no_checksums(device, silent, head, result):
    world = World(device, prefill_tp=2)
    ticket = world.ticket()
    first, second = (world.report(ticket, rank) for rank in range(2))
    if head is not None:
        world.tensors[0][BLOCKS[0], 0, head, 0] += 1
    counts, reason = world.compare(world.delivered(ticket, [silent(first), second]))
    assert counts == result
    assert (reason is not None) == (result == WRONG)


def test_requests_without_checksums_are_counted_and_told_once(world, caplog):
    for _ in range(3):
        assert world.compare(world.delivered(reports=[None])) == (UNKNOWN_, None)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "prefill engine p sends no checksums: its `verify_kv`" in caplog.text


def test_prefill_that_goes_on_may_have_sent_a_head_major_block_with_more_tokens(device):
    """A whole last block stays as it is, and so do the prompt's tokens in a block of another order."""
    for heads_first in (True, False):
        world = World(device, heads_first=heads_first)
        partial, whole = world.ticket(), world.ticket(num_tokens=2 * BLOCK)
        assert world.report(partial, 0) != UNKNOWN
        assert (world.report(partial, 0, grows=True) == UNKNOWN) == heads_first
        assert world.report(whole, 0, grows=True) != UNKNOWN


def test_more_tensors_than_a_report_can_have_are_unknown(world):
    [tensor] = world.caches.description.tensors[:1]
    tensors = tuple(msgspec.structs.replace(tensor, part=n) for n in range(MAX_ROWS + 1))
    rank = RankDescription(0, 0, "", "", msgspec.structs.replace(world.caches.description, tensors=tensors))
    reports = {n: Destination(rank, tuple(range(n))) for n in (MAX_ROWS, MAX_ROWS + 1)}
    found = report_checksums(world.ticket(), [], reports)
    assert found[MAX_ROWS] != UNKNOWN
    assert found[MAX_ROWS + 1] == UNKNOWN


def reported(rows, columns):
    """Returns a report of these sums."""
    tallies = Tallies.empty(Form.SUM_64, len(rows), 1, len(columns))
    tallies.lanes[0].rows[:], tallies.lanes[0].columns[:] = rows, columns
    return tallies.encode()


def test_a_wrong_report_ends_no_engine(world):
    """Of a tensor that has no tokens here, or whose rows and columns contradict each other."""
    delivered = world.delivered()
    right = np.frombuffer(delivered.reports[0].checksums, "<u8")[1:]
    rows, columns = right[: len(world.tensors)].copy(), right[len(world.tensors) :].copy()
    rows[0] += np.uint64(1)
    for wrong, result in ((columns, UNKNOWN_), (columns + tensor_weights(1)[0] * (np.arange(3) == 0), WRONG)):
        counts, _ = world.compare(world.delivered(reports=[reported(rows, wrong.astype(np.uint64))]))
        assert counts == result
    nothing = replace(delivered, verified=replace(delivered.verified, blocks=([0, 0, 0],)))
    counts, reason = world.compare(nothing)
    assert counts == WRONG
    assert "layer 0 tensor 0" in reason


def test_what_arrived_before_sleep_is_never_compared(world, monkeypatch):
    compared, pending, late = (world.delivered() for _ in range(3))
    assert world.compare(compared) == (RIGHT, None)
    world.verifier.begin([pending])
    world.verifier.sleep()
    for tensor in world.tensors:
        tensor.zero_()

    def submit(*_):
        pytest.fail("memory that is unmapped would be read")

    with monkeypatch.context() as patch:
        patch.setattr(world.device, "submit", submit)
        world.verifier.begin([late])
        assert world.verifier.verify_again([compared.expect.ticket_id]) == []
        assert [reason for _, reason in world.verifier.take(5.0)] == [None, None]
        assert world.verifier.take_counts() == {"unknown": 2}
    world.verifier.wake()
    assert world.verifier.verify_again([compared.expect.ticket_id]) == []
    assert world.compare(world.delivered()) == (RIGHT, None)


def test_a_device_that_never_takes_the_checksums_holds_no_request(world, monkeypatch, caplog):
    """Neither before it begins nor in the step that does."""
    right, late = world.delivered(), world.delivered()
    assert world.compare(right) == (RIGHT, None)
    monkeypatch.setattr(checksums, "_LONGEST_S", 0.05)
    monkeypatch.setattr(world.device, "submit", lambda *_: CpuEvent())
    assert world.verifier.verify_again([right.expect.ticket_id]) == []
    assert world.verifier.take_counts() == UNKNOWN_
    world.verifier.begin([late])
    assert world.verifier.take(0.01) == []
    assert world.verifier.take(5.0) == [(late, None)]
    assert world.verifier.take_counts() == UNKNOWN_
    assert caplog.text.count("the device has not taken its checksums in 0.05 s") == 2


def test_a_step_does_not_compare_all_that_has_arrived(world, monkeypatch):
    monkeypatch.setattr(checksums, "_STEP_S", 0.0)
    world.verifier.begin([world.delivered() for _ in range(3)])
    world.device.idle(5)
    assert [len(world.verifier.take(5.0)) for _ in range(4)] == [1, 1, 1, 0]


def test_requests_that_wait_for_their_first_step_are_bounded(world, monkeypatch):
    monkeypatch.setattr(checksums, "_MAX_WAITING", 2)
    waiting = [world.delivered() for _ in range(3)]
    for each in waiting:
        assert world.compare(each) == (RIGHT, None)
    world.tensors[0][BLOCKS[0]].zero_()
    overwritten = world.verifier.verify_again([each.expect.ticket_id for each in waiting])
    assert [expect for expect, _ in overwritten] == [each.expect for each in waiting[1:]]
    assert world.verifier.take_counts() == {"overwritten": 2}
