# SPDX-License-Identifier: Apache-2.0
"""Each emulated operator against CPU torch."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cann_on_host

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(shapes))
    return tuple((torch.randn(shape, generator=generator) * 8).to(dtype) for shape in shapes)


def on(device: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(on(device, item) for item in value)
    return value


def assert_same(run: Callable[..., Any], *arguments: Any) -> None:
    """`run` gives the same on the NPU as on the CPU, bit by bit, and leaves the same in its arguments."""
    expected_arguments, arguments = on("cpu", arguments), on("npu", arguments)
    expected, got = run(*expected_arguments), run(*arguments)
    torch.testing.assert_close(on("cpu", got), expected, rtol=0, atol=0)
    torch.testing.assert_close(on("cpu", arguments), expected_arguments, rtol=0, atol=0)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
INDEX = torch.tensor([3, 0, 3, 1])

ACLNN: dict[str, tuple[Callable[..., Any], ...]] = {
    "aclnnInplaceCopy": (
        lambda x: x[:, 1:3].contiguous(),
        lambda x: x.t().contiguous(),
        lambda x: x[0].expand(3, x.shape[1]).contiguous(),
        lambda x: torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device).t().copy_(x),
        lambda x: x[1:3].copy_(x[0:2].clone()),
        lambda x: x.to(torch.float32),
        lambda x: x.to(torch.int32),
        lambda x: x.to(torch.bfloat16),
    ),
    "aclnnCast": (
        lambda x: torch.ops.npu.npu_dtype_cast(x, torch.float32) if x.device.type == "npu" else x.to(torch.float32),
    ),
    "aclnnConstantPadNd": (lambda x: F.pad(x, (1, 2)), lambda x: F.pad(x, (0, 0, 3, 0), value=1)),
    "aclnnInplaceZero": (lambda x: x.zero_(), lambda x: torch.zeros(3, 5, dtype=x.dtype, device=x.device)),
    "aclnnInplaceOne": (lambda x: torch.ones(3, 5, dtype=x.dtype, device=x.device),),
    "aclnnInplaceFillScalar": (lambda x: x.fill_(1), lambda x: x[:, 2].fill_(0)),
    "aclnnIndexSelect": (
        lambda x: x.index_select(0, INDEX.to(x.device)),
        lambda x: x.index_select(1, INDEX.int().to(x.device)),
        lambda x: torch.index_select(x, 0, INDEX.to(x.device), out=torch.empty(4, 6, dtype=x.dtype, device=x.device)),
    ),
    "aclnnGather": (lambda x: x.gather(0, INDEX.to(x.device).view(1, 4)),),
    "aclnnCat": (lambda x: torch.cat([x, x[1:]], 0), lambda x: torch.cat([x, x], 1)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "run"), [(name, run) for name, runs in ACLNN.items() for run in runs])
def test_aclnn_operator(name: str, run: Callable[..., Any], dtype: torch.dtype) -> None:
    assert_same(run, *tensors((5, 6), dtype=dtype))


@pytest.mark.parametrize("arguments", [(7,), (2, 9), (2, 9, 3), (0.5, 4.0, 0.25)])
def test_arange(arguments: tuple[float, ...]) -> None:
    assert torch.equal(torch.arange(*arguments, device="npu").cpu(), torch.arange(*arguments))


def test_every_aclnn_operator_is_tested_and_used() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", cann_on_host.library_folder() / "libopapi.so"], capture_output=True, text=True
    ).stdout
    suffix = "GetWorkspaceSize"
    emulated = {line.split()[-1].removesuffix(suffix) for line in symbols.splitlines() if line.endswith(suffix)}
    assert emulated == set(ACLNN) | {"aclnnArange"}
    cann_on_host.reset_counters()
    x = tensors((5, 6))[0].npu()
    for runs in ACLNN.values():
        for run in runs:
            run(x.clone())
    torch.arange(5, device="npu")
    assert emulated - set(cann_on_host.launches()) == set()


UNARY = [
    "abs",
    "neg",
    "exp",
    "sqrt",
    "rsqrt",
    "log",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "floor",
    "ceil",
    "round",
    "isfinite",
    "isnan",
    "relu",
    "square",
    "reciprocal",
    "sign",
    "sum",
    "mean",
    "max",
    "min",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "any",
    "all",
    "prod",
    "cumsum_0",
    "softmax_1",
    "log_softmax_1",
    "sort",
    "topk_2",
    "nonzero",
    "unique",
    "flip_0",
    "tril",
    "triu",
    "logical_not",
    "norm",
    "clone",
    "contiguous",
    "silu",
    "gelu",
    "isinf",
    "erf",
    "var",
    "std",
    "logsumexp_1",
]


@pytest.mark.parametrize("name", UNARY)
def test_aten_operator(name: str) -> None:
    base, _, argument = name.partition("_") if name[-1].isdigit() else (name, "", "")
    if base.startswith("log_softmax") or name.startswith("log_softmax"):
        base, argument = "log_softmax", "1"
    arguments = {"flip": ((0,),)}.get(base, (int(argument),) if argument else ())
    function = getattr(torch.Tensor, base, None) or getattr(F, base)
    assert_same(lambda x: tuple_of(function(x, *arguments)), tensors((5, 6))[0].abs() + 0.5)


def tuple_of(result: Any) -> Any:
    return tuple(result) if isinstance(result, tuple) else result


BINARY: tuple[Callable[..., Any], ...] = (
    lambda x, y: x + y,
    lambda x, y: x - 2 * y,
    lambda x, y: x * y + 1,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: x.div(y.abs() + 1, rounding_mode="floor"),
    lambda x, y: x.remainder(3),
    lambda x, y: x.pow(2),
    lambda x, y: (x > y, x >= y, x < y, x <= y, x == y, x != y),
    lambda x, y: (x > 1, x >= 1, x < 1, x <= 1, x == 1, x != 1),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: (x > 0) & (y > 0),
    lambda x, y: (x > 0) | (y > 0),
    lambda x, y: x.masked_fill(y > 0, 3),
    lambda x, y: x.masked_select(y > 0),
    lambda x, y: x[y > 0],
    lambda x, y: x[INDEX.to(x.device)],
    lambda x, y: x.index_copy_(0, INDEX[:2].to(x.device), y[:2]),
    lambda x, y: x.index_put_((INDEX[:2].to(x.device),), y[:2]),
    lambda x, y: x.index_add_(0, INDEX.to(x.device), y[:4]),
    lambda x, y: x.scatter_(0, INDEX.to(x.device).view(1, 4), y[:1, :4]),
    lambda x, y: torch.stack([x, y]),
    lambda x, y: torch.matmul(x, y.t()),
    lambda x, y: F.linear(x, y),
    lambda x, y: torch.bmm(x.view(1, 5, 6), y.view(1, 6, 5)),
    lambda x, y: torch.addmm(x[:, :5], x, y.t()),
    lambda x, y: torch.einsum("ij,kj->ik", x, y),
    lambda x, y: F.embedding(INDEX.to(x.device), y),
    lambda x, y: x.clamp_(-1, 1).add_(y, alpha=2).mul_(0.5),
    lambda x, y: torch.split(x, 2)[1].clone(),
    lambda x, y: x.repeat(2, 1),
    lambda x, y: x.repeat_interleave(2, 0),
    lambda x, y: x.permute(1, 0).reshape(3, 10),
    lambda x, y: x.view(torch.int32).view(torch.float32),
    lambda x, y: torch.full_like(x, 2.5),
    lambda x, y: x.roll(1, 0),
    lambda x, y: torch.equal(x, y),
    lambda x, y: x[0, 0].item(),
)


@pytest.mark.parametrize("run", BINARY)
def test_aten_operators(run: Callable[..., Any]) -> None:
    assert_same(run, *tensors((5, 6), (5, 6)))


def test_a_cpu_argument_is_read_at_the_call() -> None:
    x, scale = torch.ones(4, device="npu"), torch.tensor(3.0)
    torch.npu.synchronize()
    with cann_on_host.delays(20_000):
        y = x * scale
        scale.fill_(100)
        assert y.cpu().eq(3).all()


# --- torch_npu's fused operators ---------------------------------------------------------------------------


def close(got: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got.cpu().float(), expected.float(), rtol=1e-4, atol=atol)


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

    q, k, cache = tensors((3, 16), (3, 8), (10, 8))
    positions = torch.tensor([4, 0, 9])
    q_npu, k_npu = q.npu(), k.npu()
    torch_npu._npu_rotary_embedding(positions.npu(), q_npu, k_npu, 8, cache.npu(), neox)
    for x, got in ((q, q_npu), (k, k_npu)):
        heads = x.view(3, -1, 8)
        cos, sin = (part.unsqueeze(1) for part in cache[positions].chunk(2, -1))
        a, b = heads.chunk(2, -1) if neox else (heads[..., ::2], heads[..., 1::2])
        p, r = a * cos - b * sin, b * cos + a * sin
        expected = torch.cat((p, r), -1) if neox else torch.stack((p, r), -1).flatten(-2)
        close(got, expected.reshape(x.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def attention_of(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """q `[queries, heads, size]`, k and v `[keys, kv_heads, size]`; the queries are the last positions."""
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

    q, k, v = tensors((7, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))
    q, k, v = q / 8, k / 8, v / 8
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
        close(got[begin:end], attention_of(q[begin:end], own_k, own_v, 0.3, window))
        begin = end
    assert lse.shape == (7, 4, 1)


def test_attention_over_tokens() -> None:
    import torch_npu

    q, k, v = (x / 8 for x in tensors((7, 4, 8), (7, 2, 8), (7, 2, 8)))
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
    close(got[:3], attention_of(q[:3], k[:3], v[:3], 0.3))
    close(got[3:], attention_of(q[3:], k[3:], v[3:], 0.3))


def test_paged_attention() -> None:
    import torch_npu

    q, k, v = (x / 8 for x in tensors((2, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8)))
    table, lengths = torch.tensor([[5, 1], [3, 2]], dtype=torch.int32), torch.tensor([7, 2], dtype=torch.int32)
    out = torch.zeros(2, 4, 8, device="npu")
    torch_npu._npu_paged_attention(q.npu(), k.npu(), v.npu(), 2, 4, 0.3, table.npu(), lengths.npu(), out)
    for i, length in enumerate(lengths.tolist()):
        own_k, own_v = (cache[table[i].long()].flatten(0, 1)[:length] for cache in (k, v))
        close(out[i : i + 1], attention_of(q[i : i + 1], own_k, own_v, 0.3))


def test_mla_decode_attention() -> None:
    import torch_npu

    q, q_rope, latent, rope = (x / 8 for x in tensors((2, 4, 1, 8), (2, 4, 1, 4), (6, 1, 4, 8), (6, 1, 4, 4)))
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
    assert got.shape == (4, 2, 1, 8)
    for i, length in enumerate(lengths):
        k = torch.cat((latent, rope), -1)[table[i].long()].flatten(0, 2)[:length].unsqueeze(1)
        v = latent[table[i].long()].flatten(0, 2)[:length].unsqueeze(1)
        query = torch.cat((q, q_rope), -1)[i].transpose(0, 1)
        close(got[:, i].transpose(0, 1), attention_of(query, k, v, 0.3))


def test_attention_update() -> None:
    """Two halves of the keys, merged, are the whole."""
    import torch_npu

    q, k, v = (x / 8 for x in tensors((3, 4, 8), (6, 2, 8), (6, 2, 8)))

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
    close(merged, whole.cpu().flatten(0, 1))


def test_mla_cache() -> None:
    import torch_npu

    kv, gamma, cos, sin = tensors((3, 1, 1, 12), (8,), (3, 1, 1, 4), (3, 1, 1, 4))
    k_cache, latent_cache = torch.zeros(2, 4, 1, 4, device="npu"), torch.zeros(2, 4, 1, 8, device="npu")
    slots = torch.tensor([6, 0, 3])
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), sin.npu(), slots.npu(), k_cache, latent_cache, cache_mode="PA"
    )
    latent = F.rms_norm(kv[..., :8], (8,), gamma, 1e-5)
    x = kv[..., 8:]
    pairs = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    rope = pairs * cos + torch.cat((-pairs[..., 2:], pairs[..., :2]), -1) * sin
    close(latent_cache.view(8, 8)[slots.npu()], latent.view(3, 8))
    close(k_cache.view(8, 4)[slots.npu()], rope.view(3, 4), atol=1e-3)


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


def test_paged_cache_load() -> None:
    import torch_npu

    k, v = tensors((6, 4, 1, 8), (6, 4, 1, 2))
    table = torch.tensor([[5, 1], [3, 2]], dtype=torch.int32)
    out_k, out_v = torch.zeros(7, 1, 8, device="npu"), torch.zeros(7, 1, 2, device="npu")
    torch_npu.atb.npu_paged_cache_load(
        k.npu(),
        v.npu(),
        table.npu(),
        torch.tensor([5, 2]),
        seq_starts=torch.tensor([1, 0]),
        key=out_k,
        value=out_v,
    )
    for cache, out in ((k, out_k), (v, out_v)):
        first, second = (cache[blocks.long()].flatten(0, 1) for blocks in table)
        assert torch.equal(out.cpu(), torch.cat((first[1:6], second[:2])))


def test_slot_mapping() -> None:
    import cann_on_host_operators

    table = torch.tensor([[5, 1, 0], [3, 2, 4], [7, 7, 7]], dtype=torch.int32)
    starts, positions = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([3, 4, 0, 1, 9])
    slots = torch.zeros(8, dtype=torch.int32, device="npu")
    cann_on_host_operators.SlotMappingKernel()[(3,)](
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
