# SPDX-License-Identifier: Apache-2.0
"""Checksums of KV add up, whatever ranks hold of it, and change with every change of it."""

import random

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vllm_ascend_pd import cli
from vllm_ascend_pd.core.checksum import (
    MAX_COLUMNS,
    MAX_ROWS,
    Form,
    SummedUnits,
    Tallies,
    column_tokens,
    common_heads,
    head_weights,
    is_selected,
)
from vllm_ascend_pd.core.kv_dump import MAX_DUMPS, Place, write_dump
from vllm_ascend_pd.core.layout import Geometry, Order, TokenShare
from vllm_ascend_pd.core.protocol import MAX_CHECKSUM_BYTES
from vllm_ascend_pd.device import checksums
from vllm_ascend_pd.device.checksums import UnitSummer, best_form, take_sums, to_numpy
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.device.event import DeviceError

BLOCK = 16


@pytest.fixture(scope="module")
def device():
    made = CpuDevice()
    yield made
    made.close()


class Cache:
    """A rank's cache with the KV of one prompt, in random blocks, and random bytes everywhere else."""

    def __init__(self, truth, order=Order.TOKEN_MAJOR, seed=0):
        self.tokens, heads, width = truth.shape
        self.heads = range(heads)
        count = -(-self.tokens // BLOCK)
        self.blocks = random.Random(seed).sample(range(1, 3 * count + 2), count)
        block_bytes = BLOCK * heads * width
        self.geometry = Geometry(0, order, "uint8", BLOCK, block_bytes, heads, heads, width)
        whole = np.random.default_rng(seed).integers(0, 256, (3 * count + 2, block_bytes), dtype=np.uint8)
        self.tensor = torch.from_numpy(whole)
        for token, values in enumerate(truth):
            block, place = whole[self.blocks[token // BLOCK]], token % BLOCK
            if order is Order.TOKEN_MAJOR:
                block.reshape(BLOCK, heads, width)[place] = values
            else:
                block.reshape(heads, BLOCK, width)[:, place] = values

    def tally(self, device, tensor=None, form=Form.SUM_64):
        tensor = self.tensor if tensor is None else tensor
        summed = SummedUnits.of(self.geometry, BLOCK, [(0, self.tokens)], [self.blocks])
        (taken,) = take_sums([UnitSummer(device, summed, form).of(tensor, tensor.data_ptr())])
        chosen = summed.chosen(0, TokenShare())
        tallies = Tallies.empty(form, 1, BLOCK, self.tokens)
        common = common_heads(self.heads, self.heads)
        tallies.add(tallies.fold([0], [to_numpy(taken)], summed, chosen), self.heads, common)
        return tallies


def differing(tally, reported):
    """Returns the rows and the columns that differ."""
    return tuple(np.flatnonzero(each).tolist() for each in tally.missing(reported))


def a_prompt(tokens, heads, width, seed):
    return np.random.default_rng(seed).integers(0, 256, (tokens, heads, width), dtype=np.uint8)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("seed", range(20))
def test_every_bit_counts_and_the_column_is_named(device, order, seed, form):
    rng = random.Random(seed)
    tokens, heads, width = rng.randrange(20, 120), 2, rng.choice([2 * (form - 1), 8, 24])
    cache = Cache(a_prompt(tokens, heads, width, seed), order, seed)
    right = cache.tally(device, form=form).encode()
    for _ in range(20):
        token, head, byte, bit = rng.randrange(tokens), rng.randrange(heads), rng.randrange(width), rng.randrange(8)
        place = token % 16
        wrong = cache.tensor.clone()
        entry = place * heads + head if order is Order.TOKEN_MAJOR else head * 16 + place
        wrong[cache.blocks[token // 16], entry * width + byte] ^= 1 << bit
        tally = cache.tally(device, wrong, form)
        assert differing(tally, right) == ([0], [token // 16])


@pytest.mark.parametrize("form", Form)
def test_changes_of_the_highest_bits_do_not_cancel_out(device, form):
    """In a sum modulo 2^32 of words of 32 bits, two would."""
    cache = Cache(a_prompt(64, 2, 64, 1), seed=1)
    right = cache.tally(device, form=form).encode()
    for count in range(2, 34):
        wrong = cache.tensor.clone()
        wrong[cache.blocks[0], 7 : 8 * count : 8] ^= 128  # bit 63 of so many neighbouring words of 64 bits
        found = differing(cache.tally(device, wrong, form), right)
        assert found == ([0], [0])


def test_what_follows_the_prompt_in_its_last_block_does_not_count(device):
    cache = Cache(a_prompt(20, 2, 8, 1), seed=1)
    right = cache.tally(device).encode()
    cache.tensor[cache.blocks[1], 4 * 16 :] ^= 255
    assert differing(cache.tally(device), right) == ([], [])


@pytest.mark.parametrize("draft", ["", "a draft"])
def test_what_a_draft_writes_after_the_prompt_in_a_head_major_block_does_not_count(device, draft):
    """Such a block is opaque: the tokens of the prompt in it are left out, too. A model writes nothing there."""
    cache = Cache(a_prompt(20, 2, 8, 1), Order.HEAD_MAJOR, seed=1)
    cache.geometry = msgspec.structs.replace(cache.geometry, draft=draft)
    right = cache.tally(device).encode()
    cache.tensor[cache.blocks[1], 15 * 8] ^= 255
    found = differing(cache.tally(device), right)
    assert found == (([], []) if draft else ([0], [1]))
    cache.tensor[cache.blocks[0], 15 * 8] ^= 255
    found = differing(cache.tally(device), right)
    assert found == (([0], [0]) if draft else ([0], [0, 1]))


def test_the_null_block_is_left_out(device):
    cache = Cache(a_prompt(64, 2, 8, 3), seed=3)
    wanted = [0, 0, *cache.blocks[2:]]
    ours = SummedUnits.of(cache.geometry, 16, [(0, 64)], [wanted])
    theirs = SummedUnits.of(cache.geometry, 16, [(0, 64)], [cache.blocks], [(wanted, 16)])
    assert ours.units.tokens.tolist() == theirs.units.tokens.tolist() == [32, 48]


@pytest.mark.parametrize("form", Form)
def test_a_report_of_the_largest_size_is_read(form):
    tokens = MAX_COLUMNS * 128 * 3 + 1
    width = column_tokens([128, 16], tokens)
    tally = Tallies.empty(form, MAX_ROWS, width, tokens)
    assert width % 128 == 0
    assert len(tally.lanes[0].columns) <= MAX_COLUMNS
    assert len(tally.encode()) <= MAX_CHECKSUM_BYTES
    assert differing(tally, tally.encode()) == ([], [])


@pytest.mark.parametrize("reported", [b"", b"x" * 7, bytes(24), bytes(32)])
def test_what_cannot_be_compared_is_no_difference(reported):
    for form in Form:
        tally = Tallies.empty(form, 1, 16, 16)
        assert tally.missing(reported) is None
        assert tally.encode()[0] == form
        assert all(tally.missing(Tallies.empty(other, 1, 16, 16).encode()) is None for other in Form if other != form)


def test_a_share_of_tickets_is_selected():
    rng = random.Random(0)
    ids = [f"{rng.getrandbits(128):032x}" for _ in range(4000)]
    few, many = ({i for i in ids if is_selected(share, i)} for share in (0.1, 0.4))
    assert few < many
    assert 300 < len(few) < 500
    assert all(is_selected(1.0, i) for i in [*ids, "f" * 32])
    assert not any(is_selected(0.0, i) for i in [*ids, "0" * 32])


def test_a_device_whose_checksums_are_not_exact_is_refused(device, monkeypatch):
    assert best_form(device) is Form.SUM_64, "a CPU has products of 64 bits"

    def in_floats(caches, offsets, entries, places, heads, words, out):
        each = caches[0][1:].reshape(-1).view(torch.int32).view(2, 16, 2, -1)
        by_entry = (each.double() @ places[0].double()).long() * entries[0][:, :, None]
        torch.sum(by_entry, 1, out=out.view(2, 2))

    monkeypatch.setattr(checksums.ops, "sum_units", in_floats)
    with pytest.raises(DeviceError, match="other checksums than the host"):
        best_form(device)


def test_products_that_saturate_leave_sums_of_32_bits_to_the_scalar_units(device, monkeypatch):
    right = checksums.ops.sum_units_32

    def saturating(caches, offsets, entries, places, heads, words, out):
        right(caches, offsets, entries, places, heads, words, out)
        out.clamp_(-1, 1)

    monkeypatch.setattr(checksums.ops, "sum_units_32", saturating)
    monkeypatch.setattr(device, "name", "npu")
    monkeypatch.setattr(checksums.ops, "npu_kernels", checksums.ops.NpuKernels())
    assert best_form(device) is Form.SUM_64
    cache = Cache(a_prompt(64, 2, 64, 1), seed=1)
    right_sums = cache.tally(device, form=Form.SUM_32).encode()  # which decode still has to take
    monkeypatch.setattr(checksums.ops, "sum_units_32", right)
    assert best_form(device) is Form.SUM_32
    assert cache.tally(device, form=Form.SUM_32).encode() == right_sums


def test_a_dump_is_bounded_private_and_read(tmp_path, device):
    """The folder takes `MAX_DUMPS`, and what is no dump is refused."""
    cache = Cache(a_prompt(64, 4, 64, 1), seed=1)
    summed = SummedUnits.of(cache.geometry, 16, [(0, 64)], [cache.blocks])
    right = cache.tally(device).encode()
    wrong = cache.tensor.clone()
    block = wrong[cache.blocks[2]].view(16, 4, 64)
    block.copy_(block.roll(1, dims=1))
    rows, _ = cache.tally(device, wrong).missing(right)
    chosen = summed.units.tokens // 16 == 2
    content, copies = UnitSummer(device, summed).content(wrong, wrong.data_ptr(), chosen)
    place = Place("layer\x1b]0;title\x07 0", int(rows[0]), copies)
    for _ in range(MAX_DUMPS + 2):
        write_dump(
            str(tmp_path), cache.geometry, content, summed.entry_weights[chosen], head_weights(cache.heads), place
        )
    files = sorted(tmp_path.iterdir())
    assert len(files) == MAX_DUMPS
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    done = CliRunner().invoke(cli.app, ["verify", str(files[0])])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[:2] == ["layer ]0;title 0", "found: heads 3 places off"]
    files[0].write_bytes(b"PK\x03\x04 no dump")
    assert CliRunner().invoke(cli.app, ["verify", str(files[0])]).exit_code == 1
