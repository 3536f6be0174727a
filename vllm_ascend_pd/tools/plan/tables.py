# SPDX-License-Identifier: Apache-2.0
"""The tables that `vllm-ascend-pd plan` prints."""

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from vllm_ascend_pd.core.ascend import BUFFER_MB
from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import PlanFigures
from vllm_ascend_pd.tools.plan.layers import LayerCache
from vllm_ascend_pd.tools.plan.times import Rates, WriteTime

_WIDTH = 80


def render(plan: PlanFigures, times: Iterable[WriteTime], compute_ms: float | None, rates: Rates | None) -> str:
    """`compute_ms`: what prefill computes the prompt in, if known."""
    console = Console(width=_WIDTH, highlight=False, markup=False, soft_wrap=False)
    with console.capture() as capture:
        console.print(_layers(plan))
        console.print(_prompt(plan))
        layer_ms = None if compute_ms is None else compute_ms / len(plan.model.layers)
        console.print(_write_times(times, layer_ms))
        if rates is not None:
            console.print(_rates(rates))
        for note in plan.notes:
            console.print(f"- {note}")
    return capture.get().rstrip()


def _layers(plan: PlanFigures) -> Table:
    """What the layers keep of a request."""
    table = Table(title=f"{plan.model.name}: {_headline(plan)}", show_header=False)
    counts = Counter(cache for caches in plan.model.layers for cache in caches)
    for cache, count in counts.items():
        once, grows = _size(count * cache.bounded_bytes), f"{count * cache.bytes_per_token:,.10g} B per token"
        name = cache.name.removesuffix(".state_cache")
        table.add_row(f"{count} x {name}", _entry(cache), once if cache.is_bounded else grows)
    return table


def _entry(cache: LayerCache) -> str:
    """Returns what a cache has for a token, or of a request."""
    if cache.is_state:
        return f"a state with {cache.tensors[-1].heads} heads" if cache.tensors else "a state of unknown size"
    first = cache.tensors[0]
    heads = f"{first.heads} heads, " if first.heads > 1 else ""
    widths = "+".join(str(tensor.width) for tensor in cache.tensors)
    per = f" for {cache.tokens_per_entry} tokens" if cache.tokens_per_entry > 1 else ""
    only = f", window of {cache.window}" if cache.window else f", chunk of {cache.chunk}" if cache.chunk else ""
    return f"{heads}{widths} {first.dtype}{per}{only}"


def _headline(plan: PlanFigures) -> str:
    once = [
        f"{_size(nbytes)} per prompt for {what}"
        for nbytes, what in ((plan.window_bytes, "windows"), (plan.state_bytes, "states"))
        if nbytes
    ]
    return ", and ".join([f"{plan.bytes_per_token:,.10g} bytes per token", *once])


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
    table.add_row("sent in all", _size(prompt.nbytes))
    taking_turns = f"; {plan.lanes} ranks take turns" if plan.lanes > 1 else ""
    table.add_row("by a prefill rank at most", _size(prompt.busiest_sender) + taking_turns)
    table.add_row("to a decode rank at most", _size(prompt.busiest_reader))
    table.add_row("room on a decode rank", _size(prompt.room))
    table.add_row("descriptors", f"{prompt.descriptors:,}; {prompt.descriptors_contiguous:,} if blocks are neighbours")
    slots = f"{staging.slots} slots of {_size(staging.slot_bytes)}, and 2 as large"
    table.add_row("staging of a prefill rank", f"{_size(staging.total_bytes)} ({slots})" if staging.slots else "none")
    if staging.groups:
        buffers = f"2 x {BUFFER_MB} MiB for each of {staging.groups} groups"
        table.add_row("HCCL of a prefill rank", f"{_size(staging.communicator_bytes)} ({buffers})")
    return table


def _write_times(write_times: Iterable[WriteTime], layer_ms: float | None) -> Table:
    computed = "" if layer_ms is None else f"; computed in {layer_ms:.2f}"
    table = Table(title=f"a layer's writes in ms, blocks near or apart{computed}")
    for column in ("chip, link, engine", "near", "apart", "all-to-all", "limited by"):
        table.add_column(column)
    for time in write_times:
        exchange = "unknown" if time.exchange_ms is None else f"{time.exchange_ms:.3f}" if time.exchange_ms else "none"
        times = (f"{time.contiguous_ms:.3f}", f"{time.scattered_ms:.3f}", exchange)
        table.add_row(str(time.costs).removesuffix(", "), *times, time.limited_by)
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
