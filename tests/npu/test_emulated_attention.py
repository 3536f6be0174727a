# SPDX-License-Identifier: Apache-2.0
"""Each emulated attention operator of torch_npu, and those on its caches, against CPU torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from operator_cases import half, near

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


def attention_of(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q `[queries, heads, size]`, k and v `[keys, kv_heads, size]`; the queries are the last positions."""
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    position = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    key = torch.arange(k.shape[0]).unsqueeze(0)
    mask = key <= position
    if window is not None:
        mask &= key > position - window
    return F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(group, 1).transpose(0, 1),
        v.repeat_interleave(group, 1).transpose(0, 1),
        attn_mask=mask,
        scale=scale,
    ).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_pages(window: int | None) -> None:
    import torch_npu

    q, k, v = half((7, 4, 64), (6, 4, 2, 64), (6, 4, 2, 64))
    table = torch.tensor([[5, 1, 0], [3, 2, 4]], dtype=torch.int32)
    lengths, ends = (9, 6), (3, 7)
    got, lse = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.flatten(2).npu(),
        v.flatten(2).npu(),
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=lengths,
        block_table=table.npu(),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout="TND",
        sparse_mode=4 if window else 3,
        pre_tokens=window or 0,
        block_size=4,
    )
    begin = 0
    for request, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        own_k, own_v = (cache[table[request].long()].flatten(0, 1)[:length] for cache in (k, v))
        near(got[begin:end], attention_of(q[begin:end], own_k, own_v, 0.3, window))
        begin = end
    assert lse.shape == (7, 4, 1)


def test_attention_over_tokens() -> None:
    import torch_npu

    q, k, v = half((7, 4, 64), (7, 2, 64), (7, 2, 64))
    got, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        actual_seq_lengths=(3, 7),
        actual_seq_lengths_kv=(3, 7),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.3,
        input_layout="TND",
        sparse_mode=3,
    )
    near(got[:3], attention_of(q[:3], k[:3], v[:3], 0.3))
    near(got[3:], attention_of(q[3:], k[3:], v[3:], 0.3))


def test_paged_attention() -> None:
    import torch_npu

    q, k, v = half((2, 4, 64), (6, 4, 2, 64), (6, 4, 2, 64))
    table, lengths = torch.tensor([[5, 1], [3, 2]], dtype=torch.int32), torch.tensor([7, 2], dtype=torch.int32)
    out = torch.zeros(2, 4, 64, dtype=torch.bfloat16, device="npu")
    torch_npu._npu_paged_attention(q.npu(), k.npu(), v.npu(), 2, 4, 0.3, table.npu(), lengths.npu(), out)
    for i, length in enumerate(lengths.tolist()):
        own_k, own_v = (cache[table[i].long()].flatten(0, 1)[:length] for cache in (k, v))
        near(out[i : i + 1], attention_of(q[i : i + 1], own_k, own_v, 0.3))


def test_mla_decode_attention() -> None:
    import torch_npu

    q, q_rope, latent, rope = half((2, 4, 1, 512), (2, 4, 1, 64), (6, 1, 4, 512), (6, 1, 4, 64))
    table, lengths = torch.tensor([[5, 1], [3, 2]], dtype=torch.int32), (7, 2)
    got, _ = torch_npu.npu_fused_infer_attention_score_v2(
        q.npu(),
        latent.npu(),
        latent.npu(),
        query_rope=q_rope.npu(),
        key_rope=rope.npu(),
        num_query_heads=4,
        num_key_value_heads=1,
        input_layout="BNSD_NBSD",
        softmax_scale=0.3,
        block_table=table.npu(),
        block_size=4,
        actual_seq_kvlen=lengths,
    )
    assert got.shape == (4, 2, 1, 512)
    for i, length in enumerate(lengths):
        k = torch.cat((latent, rope), -1)[table[i].long()].flatten(0, 2)[:length].unsqueeze(1)
        v = latent[table[i].long()].flatten(0, 2)[:length].unsqueeze(1)
        query = torch.cat((q, q_rope), -1)[i].transpose(0, 1)
        near(got[:, i].transpose(0, 1), attention_of(query, k, v, 0.3))


def test_attention_update() -> None:
    """Two halves of the keys, merged, are the whole."""
    import torch_npu

    q, k, v = half((3, 4, 64), (6, 2, 64), (6, 2, 64))

    def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return torch_npu.npu_fused_infer_attention_score(
            q.npu(),
            k[start:stop].contiguous().npu(),
            v[start:stop].contiguous().npu(),
            actual_seq_lengths=(3,),
            actual_seq_lengths_kv=(stop - start,),
            num_heads=4,
            num_key_value_heads=2,
            scale=0.3,
            input_layout="TND",
        )

    (out_a, lse_a), (out_b, lse_b), (whole, _) = part(0, 4), part(4, 6), part(0, 6)
    merged, _ = torch_npu.npu_attention_update(
        [lse.flatten() for lse in (lse_a, lse_b)], [out.flatten(0, 1) for out in (out_a, out_b)], 0
    )
    near(merged, whole.cpu().flatten(0, 1))


def test_mla_cache() -> None:
    import torch_npu

    kv, gamma, cos, sin = half((3, 1, 1, 12), (8,), (3, 1, 1, 4), (3, 1, 1, 4))
    k_cache, latent_cache = (torch.zeros(2, 4, 1, size, dtype=torch.bfloat16, device="npu") for size in (4, 8))
    slots = torch.tensor([6, 0, 3])
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), sin.npu(), slots.npu(), k_cache, latent_cache, cache_mode="PA"
    )
    kv, gamma, cos, sin = kv.float(), gamma.float(), cos.float(), sin.float()
    latent = F.rms_norm(kv[..., :8], (8,), gamma, 1e-5)
    x = kv[..., 8:]
    pairs = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    rope = pairs * cos + torch.cat((-pairs[..., 2:], pairs[..., :2]), -1) * sin
    near(latent_cache.view(8, 8)[slots.npu()], latent.view(3, 8))
    near(k_cache.view(8, 4)[slots.npu()], rope.view(3, 4))


def test_paged_cache_load() -> None:
    import torch_npu

    k, v = half((6, 4, 1, 8), (6, 4, 1, 2))
    table = torch.tensor([[5, 1], [3, 2]], dtype=torch.int32)
    out_k, out_v = (torch.zeros(7, 1, size, dtype=torch.bfloat16, device="npu") for size in (8, 2))
    torch_npu.atb.npu_paged_cache_load(
        k.npu(),
        v.npu(),
        table.npu(),
        torch.tensor([5, 2], dtype=torch.int32),
        seq_starts=torch.tensor([1, 0], dtype=torch.int32),
        key=out_k,
        value=out_v,
    )
    for cache, out in ((k, out_k), (v, out_v)):
        first, second = (cache[blocks.long()].flatten(0, 1) for blocks in table)
        assert torch.equal(out.cpu(), torch.cat((first[1:6], second[:2])))
