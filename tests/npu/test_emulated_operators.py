# SPDX-License-Identifier: Apache-2.0
"""Each emulated aclnn operator, and ATen operators on the CPU's kernels, against CPU torch."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cann_on_host
from operator_cases import assert_same, tensors

pytestmark = [pytest.mark.npu, pytest.mark.emulated]


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
