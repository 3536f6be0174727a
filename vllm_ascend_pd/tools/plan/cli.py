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


def _count(text: str, default: str | None = None, least: int = 1) -> Any:
    return typer.Option(help=text, metavar="N", min=least, show_default=default or True)


def _number(text: str) -> Any:
    return typer.Option(help=text, metavar="X", min=0.001)


_DTYPES = f"Of the KV cache: {', '.join(CacheDtype)}."
_MEASURED = "Output of doctor --hardware --json."
_GIVEN = "--output-tokens, --decode-step-ms, --decode-requests, --decode-kv-gib and --link-gbit"


def plan(
    model: Annotated[Path, typer.Argument(exists=True, help="The model's config.json, or the folder that has it.")],
    prefill_tp: Annotated[int, _count("Tensor-parallel size of prefill.")] = 1,
    prefill_pp: Annotated[int, _count("Pipeline-parallel size of prefill.")] = 1,
    prefill_dp: Annotated[int, _count("Data-parallel size of prefill.")] = 1,
    decode_tp: Annotated[int, _count("Tensor-parallel size of decode.")] = 1,
    decode_pp: Annotated[int, _count("Pipeline-parallel size of decode.")] = 1,
    decode_dp: Annotated[int, _count("Data-parallel size of decode.")] = 1,
    block_size: Annotated[int, _count("Tokens per KV cache block.")] = DEFAULT_BLOCK_SIZE,
    prefill_block_size: Annotated[int | None, _count("Of prefill.", "--block-size")] = None,
    decode_block_size: Annotated[int | None, _count("Of decode.", "--block-size")] = None,
    kv_cache_dtype: Annotated[CacheDtype, typer.Option(help=_DTYPES, metavar="TYPE")] = CacheDtype.AUTO,
    max_num_batched_tokens: Annotated[int, _count("Tokens per prefill step.")] = 8192,
    # Of a prompt of one token, decode may compute all itself.
    prompt_tokens: Annotated[int, _count("Tokens of the prompt.", least=2)] = 1000,
    measured: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, metavar="FILE", help=_MEASURED)] = None,
    compute_ms_per_1000_tokens: Annotated[float | None, _number("Prefill's time.")] = None,
    output_tokens: Annotated[int | None, _count("Tokens of an answer.")] = None,
    decode_step_ms: Annotated[float | None, _number("Time of a decode step.")] = None,
    decode_requests: Annotated[int | None, _count("Requests at once on a data-parallel rank.")] = None,
    decode_kv_gib: Annotated[float | None, _number("KV cache of a decode rank.")] = None,
    link_gbit: Annotated[float | None, _number("Bandwidth of a rank, in each direction.")] = None,
    prefill_first_tokens: Annotated[int | None, _count("Decode's key of that name.", "a step", least=0)] = None,
    version: Version = False,
) -> None:
    """Print what a prefill and a decode engine transfer. Starts no engine.

    All options from --compute-ms-per-1000-tokens to --link-gbit together give the prefill engines per decode engine
    (docs/plan.md).
    """
    given = (output_tokens, decode_step_ms, decode_requests, decode_kv_gib, link_gbit)
    if any(value is not None for value in given) and None in (*given, compute_ms_per_1000_tokens):
        raise USAGE_ERROR(f"{_GIVEN} need each other and --compute-ms-per-1000-tokens")
    # Imported here so that other commands start faster.
    from vllm_ascend_pd.core.config import ConnectorConfig
    from vllm_ascend_pd.tools.plan.exchange import make_plan
    from vllm_ascend_pd.tools.plan.tables import render
    from vllm_ascend_pd.tools.plan.times import Traffic, make_rates, read_measured, write_times
    from vllm_ascend_pd.tools.write_costs import HIXL

    sides = (
        PlannedEngine("prefill", prefill_tp, prefill_pp, prefill_dp, prefill_block_size or block_size),
        PlannedEngine("decode", decode_tp, decode_pp, decode_dp, decode_block_size or block_size),
    )
    batched = max_num_batched_tokens
    slots = ConnectorConfig().slots(batched)
    compute_ms = None if compute_ms_per_1000_tokens is None else compute_ms_per_1000_tokens * prompt_tokens / 1000
    try:
        costs = HIXL if measured is None else read_measured(measured)
        shape = read_model(model, kv_cache_dtype)
        figures = make_plan(shape, *sides, step_tokens=batched, staging_slots=slots, tokens=prompt_tokens)
        rates = None
        if compute_ms is not None and None not in given:
            first = batched if prefill_first_tokens is None else prefill_first_tokens
            traffic = Traffic(*cast("tuple[int, float, int, float, float]", given), first)
            rates = make_rates(figures, compute_ms, traffic)
    except OSError as error:
        raise USAGE_ERROR(f"cannot read the model's config.json, or what was measured: {error}") from None
    except PlanError as error:
        print(f"vllm-ascend-pd: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(render(figures, write_times(figures, costs), compute_ms, rates))
