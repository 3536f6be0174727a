# SPDX-License-Identifier: Apache-2.0
"""torch_npu's fused operators, attention apart, against CPU torch."""

import pytest
import torch
import torch.nn.functional as F

from operator_cases import close, half, near, tensors

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


def test_rms_norm() -> None:
    import torch_npu

    x, residual, weight = tensors((5, 8), (5, 8), (8,))
    close(torch_npu.npu_rms_norm(x.npu(), weight.npu(), 1e-5)[0], F.rms_norm(x, (8,), weight, 1e-5))
    y, _, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), weight.npu(), 1e-5)
    close(total, x + residual)
    close(y, F.rms_norm(x + residual, (8,), weight, 1e-5))
    close(torch.ops._C_ascend.npu_gemma_rms_norm(x.npu(), weight.npu(), 1e-5)[0], F.rms_norm(x, (8,), 1 + weight, 1e-5))


def test_swiglu() -> None:
    import torch_npu

    (x,) = tensors((5, 8))
    close(torch_npu.npu_swiglu(x.npu()), F.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding(neox: bool) -> None:
    import torch_npu

    q, k, cache = half((3, 16), (3, 8), (10, 8))
    positions = torch.tensor([4, 0, 9])
    q_npu, k_npu = q.npu(), k.npu()
    torch_npu._npu_rotary_embedding(positions.npu(), q_npu, k_npu, 8, cache.npu(), neox)
    for x, got in ((q, q_npu), (k, k_npu)):
        heads = x.float().view(3, -1, 8)
        cos, sin = (part.unsqueeze(1) for part in cache[positions].float().chunk(2, -1))
        a, b = heads.chunk(2, -1) if neox else (heads[..., ::2], heads[..., 1::2])
        p, r = a * cos - b * sin, b * cos + a * sin
        expected = torch.cat((p, r), -1) if neox else torch.stack((p, r), -1).flatten(-2)
        near(got, expected.reshape(x.shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_reshape_and_cache(dtype: torch.dtype) -> None:
    import torch_npu

    k, v = tensors((4, 2, 8), (4, 2, 8), dtype=dtype)
    k_cache, v_cache = (torch.zeros(3, 4, 2, 8, dtype=dtype) for _ in range(2))
    slots = torch.tensor([5, -1, 0, 11], dtype=torch.int32)
    k_npu, v_npu = k_cache.npu(), v_cache.npu()
    torch_npu._npu_reshape_and_cache(k.npu(), v.npu(), k_npu, v_npu, slots.npu())
    for tokens, cache, got in ((k, k_cache, k_npu), (v, v_cache, v_npu)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // 4, slot % 4] = tokens[token]
        assert torch.equal(got.cpu(), cache)


def test_transpose_batchmatmul() -> None:
    import torch_npu

    x, y = tensors((2, 3, 4), (2, 4, 5))
    close(torch_npu.npu_transpose_batchmatmul(x.npu(), y.npu(), perm_y=(1, 0, 2)), torch.bmm(x, y).permute(1, 0, 2))


def test_matmul_add() -> None:
    import torch_npu

    x, y, c = tensors((4, 3), (4, 5), (3, 5))
    out = c.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), y.npu(), out)
    close(out, c + x.t() @ y)


def test_rotary_mul() -> None:
    import torch_npu

    x, cos, sin = half((2, 3, 4, 8), (1, 3, 1, 8), (1, 3, 1, 8))
    a, b = x.float().chunk(2, -1)
    near(torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu()), x * cos + torch.cat((-b, a), -1) * sin)


def test_split_of_qkv_with_three_positions() -> None:
    """Against what vLLM computes without a kernel."""
    from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

    heads, kv_heads, size, section = 4, 2, 16, [4, 2, 2]
    qkv, q_weight, k_weight, cos_sin = half((5, (heads + 2 * kv_heads) * size), (size,), (size,), (3, 5, size))
    given = [x.npu() for x in (qkv, q_weight, k_weight, cos_sin)]
    got = torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(
        *given, heads, kv_heads, size, 1e-6, section, True, size, None, None, False
    )
    cos, sin = (apply_interleaved_rope(x.float(), section).unsqueeze(1) for x in cos_sin.chunk(2, -1))
    split = qkv.float().view(5, -1, size).split([heads, kv_heads, kv_heads], 1)
    for part, weight, out in zip(split, (q_weight, k_weight), got, strict=False):
        a, b = F.rms_norm(part, (size,), weight.float(), 1e-6).chunk(2, -1)
        near(out, torch.cat((a * cos - b * sin, b * cos + a * sin), -1).flatten(1))
    assert torch.equal(got[2].cpu(), split[2].flatten(1).to(torch.bfloat16))
    assert got[3].shape == (5, 0)


def test_slot_mapping() -> None:
    import cann_on_host_triton

    table = torch.tensor([[5, 1, 0], [3, 2, 4], [7, 7, 7]], dtype=torch.int32)
    starts, positions = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([3, 4, 0, 1, 9])
    slots = torch.zeros(8, dtype=torch.int32, device="npu")
    cann_on_host_triton.SlotMappingKernel()[(3,)](
        5,
        8,
        starts.npu(),
        positions.npu(),
        table.npu(),
        3,
        4,
        slots,
        TOTAL_CP_WORLD_SIZE=1,
        TOTAL_CP_RANK=0,
        CP_KV_CACHE_INTERLEAVE_SIZE=1,
        PAD_ID=-1,
        BLOCK_SIZE=1024,
    )
    assert slots.cpu().tolist() == [5 * 4 + 3, 4, 12, 13, 4 * 4 + 1, -1, -1, -1]
