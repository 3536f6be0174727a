# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ascend-pd plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from vllm_ascend_pd.tools.command_line import USAGE_ERROR, Version
from vllm_ascend_pd.tools.plan.engine import DEFAULT_BLOCK_SIZE, PlannedEngine
from vllm_ascend_pd.tools.plan.model import CacheDtype, PlanError, read_model


def _count(text: str, default: str | None = None) -> Any:
    return typer.Option(help=text, metavar="N", min=1, show_default=default or True)


def _number(text: str) -> Any:
    return typer.Option(help=text, metavar="X", min=0.001)


_COMPUTE = "Milliseconds that prefill needs for 1000 tokens, beside a layer's writes."
_STEP = "Maximum number of tokens per prefill step. Determines the size of the staging buffer."
_PROMPT = "Tokens of a usual prompt. With the option above and the five below, adds engines per engine."

_MEASURED = "Output of doctor --hardware --json, for the times of writes instead of HIXL's figures."


def plan(
    model: Annotated[Path, typer.Argument(exists=True, help="The model's config.json, or the folder that has it.")],
    prefill_tp: Annotated[int, _count("Tensor-parallel size of prefill.")] = 1,
    prefill_pp: Annotated[int, _count("Pipeline-parallel size of prefill.")] = 1,
    prefill_dp: Annotated[int, _count("Data-parallel size of prefill.")] = 1,
    decode_tp: Annotated[int, _count("Tensor-parallel size of decode.")] = 1,
    decode_pp: Annotated[int, _count("Pipeline-parallel size of decode.")] = 1,
    decode_dp: Annotated[int, _count("Data-parallel size of decode.")] = 1,
    block_size: Annotated[int, _count("Tokens per KV cache block.")] = DEFAULT_BLOCK_SIZE,
    prefill_block_size: Annotated[int | None, _count("Tokens per block on prefill.", "--block-size")] = None,
    decode_block_size: Annotated[int | None, _count("Tokens per block on decode.", "--block-size")] = None,
    kv_cache_dtype: Annotated[CacheDtype, typer.Option(help="Data type of the KV cache.")] = CacheDtype.AUTO,
    max_num_batched_tokens: Annotated[int, _count(_STEP)] = 8192,
    compute_ms_per_1000_tokens: Annotated[float | None, _number(_COMPUTE)] = None,
    prompt_tokens: Annotated[int | None, _count(_PROMPT)] = None,
    output_tokens: Annotated[int | None, _count("Tokens of a usual answer.")] = None,
    decode_step_ms: Annotated[float | None, _number("Milliseconds of a decode step with the requests below.")] = None,
    decode_requests: Annotated[int | None, _count("Most requests that a data-parallel rank decodes at once.")] = None,
    decode_kv_gib: Annotated[float | None, _number("GiB of KV cache on each decode rank.")] = None,
    link_gbit: Annotated[float | None, _number("Bandwidth of a rank in Gbit/s, in each direction.")] = None,
    measured: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help=_MEASURED)] = None,
    version: Version = False,
) -> None:
    """Print what a prefill and a decode engine transfer. Starts no engine."""
    given = (prompt_tokens, output_tokens, decode_step_ms, decode_requests, decode_kv_gib, link_gbit)
    if any(value is not None for value in given) and None in (*given, compute_ms_per_1000_tokens):
        raise USAGE_ERROR(
            "--prompt-tokens, --output-tokens, --decode-step-ms, --decode-requests, --decode-kv-gib and --link-gbit "
            "need each other and --compute-ms-per-1000-tokens"
        )
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.core.config import ConnectorConfig
    from vllm_ascend_pd.tools.plan.exchange import PROMPT_TOKENS, make_plan
    from vllm_ascend_pd.tools.plan.tables import render
    from vllm_ascend_pd.tools.plan.times import Traffic, make_rates, read_measured, write_times
    from vllm_ascend_pd.tools.write_costs import HIXL

    sides = (
        PlannedEngine("prefill", prefill_tp, prefill_pp, prefill_dp, prefill_block_size or block_size),
        PlannedEngine("decode", decode_tp, decode_pp, decode_dp, decode_block_size or block_size),
    )
    slots = ConnectorConfig().slots(max_num_batched_tokens)
    compute_ms = None if compute_ms_per_1000_tokens is None else compute_ms_per_1000_tokens * PROMPT_TOKENS / 1000
    try:
        costs = HIXL if measured is None else read_measured(measured)
        shape = read_model(model, kv_cache_dtype)
        figures = make_plan(shape, *sides, step_tokens=max_num_batched_tokens, staging_slots=slots)
        rates = None
        if compute_ms is not None and None not in given:
            traffic = Traffic(*cast("tuple[int, int, float, int, float, float]", given))
            rates = make_rates(figures, compute_ms, traffic)
    except OSError as error:
        raise USAGE_ERROR(f"cannot read the model's config.json, or what was measured: {error}") from None
    except PlanError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(render(figures, write_times(figures, costs), compute_ms, rates))
