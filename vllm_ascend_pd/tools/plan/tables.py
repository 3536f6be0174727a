# SPDX-License-Identifier: Apache-2.0
"""The tables that `vllm-ascend-pd plan` prints."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from vllm_ascend_pd.core.ascend import BUFFER_MB
from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import PlanFigures
from vllm_ascend_pd.tools.plan.times import Rates, WriteTime

_WIDTH = 120


def render(plan: PlanFigures, times: Iterable[WriteTime], compute_ms: float | None, rates: Rates | None) -> str:
    """`compute_ms`: what prefill computes the prompt in, if known."""
    console = Console(width=_WIDTH, highlight=False, markup=False, soft_wrap=False)
    with console.capture() as capture:
        console.print(_headline(plan))
        console.print(_prompt(plan))
        layer_ms = None if compute_ms is None else compute_ms / len(plan.model.cached)
        console.print(_write_times(times, layer_ms))
        if rates is not None:
            console.print(_rates(rates))
        for note in plan.notes:
            console.print(f"- {note}")
    return capture.get().rstrip()


def _headline(plan: PlanFigures) -> str:
    model = plan.model
    heads = "MLA's latent" if model.mla else f"{model.kv_heads} KV heads"
    widths = " + ".join(map(str, model.widths))
    if model.compressed:
        return (
            f"{model.name}: {len(model.cached)} layers with compressed caches, latents of {widths} "
            f"{model.dtype}\n"
            f"{plan.bytes_per_token:,.10g} bytes per token, and {_size(plan.window_bytes)} per prompt for windows"
        )
    return (
        f"{model.name}: {model.cached_layers} of {len(model.cached)} layers cache {heads}, {widths} "
        f"{model.dtype} each\n"
        f"{plan.bytes_per_token:,.10g} bytes per token, {plan.bytes_per_token_and_layer:,.10g} of them per layer"
    )


def _engine(engine: PlannedEngine) -> str:
    sizes = [f"TP {engine.tp}"]
    sizes += [f"PP {engine.pp}"] if engine.pp > 1 else []
    sizes += [f"DP {engine.dp}"] if engine.dp > 1 else []
    return " ".join(sizes)


def _prompt(plan: PlanFigures) -> Table:
    prompt, staging = plan.prompt, plan.staging
    table = Table(
        title=f"prefill {_engine(plan.prefill)} -> decode {_engine(plan.decode)}: a prompt of {prompt.tokens} tokens",
        show_header=False,
    )
    table.add_row("units", f"{prompt.units} of {plan.unit_tokens} tokens")
    table.add_row("regrouping", ", ".join(plan.regrouping) or "none")
    taking_turns = f"; {plan.lanes} ranks take turns" if plan.lanes > 1 else ""
    table.add_row("sent in all", _size(prompt.nbytes))
    table.add_row("by a prefill rank at most", _size(prompt.busiest_sender) + taking_turns)
    table.add_row("to a decode rank at most", _size(prompt.busiest_reader))
    table.add_row(
        "descriptors", f"{prompt.descriptors:,}; {prompt.descriptors_contiguous:,} if all blocks are neighbours"
    )
    slots = f"{staging.slots} slots of {_size(staging.slot_bytes)} for {staging.step_tokens} tokens, and 2 as large"
    table.add_row(
        "staging memory of each prefill rank", f"{_size(staging.total_bytes)} ({slots})" if staging.slots else "none"
    )
    if staging.groups:
        buffers = f"2 x {BUFFER_MB} MiB for each of {staging.groups} groups, beside vLLM's cache"
        table.add_row("HCCL memory of each prefill rank", f"{_size(staging.communicator_bytes)} ({buffers})")
    return table


def _write_times(write_times: Iterable[WriteTime], layer_ms: float | None) -> Table:
    computed = "" if layer_ms is None else f"; prefill computes it in {layer_ms:.2f} ms"
    table = Table(title=f"a layer's writes{computed}")
    for column in ("chip, link", "engine", "all blocks neighbours", "no blocks neighbours", "all-to-all", "limited by"):
        table.add_column(column)
    for time in write_times:
        exchange = (
            "unknown" if time.exchange_ms is None else f"{time.exchange_ms:.3f} ms" if time.exchange_ms else "none"
        )
        times = (f"{time.contiguous_ms:.3f} ms", f"{time.scattered_ms:.3f} ms", exchange)
        table.add_row(f"{time.costs.chip}, {time.costs.link}", time.costs.engine, *times, time.limited_by)
    return table


def _rates(rates: Rates) -> Table:
    table = Table(title="requests/s of one engine", show_header=False)
    sides = {"prefill": rates.prefill, "decode": rates.decode}
    for side, parts in sides.items():
        for part, rate in parts.items():
            table.add_row(f"{side}: {part}", f"{rate:.2f}")
    table.add_section()
    table.add_row("prefill engines per decode engine", f"{rates.prefill_per_decode:.2f}")
    for side, parts in sides.items():
        table.add_row(f"{side} is limited by", min(parts, key=lambda part: parts[part]))
    return table


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
