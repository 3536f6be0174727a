# SPDX-License-Identifier: Apache-2.0
"""The tables that `vllm-ascend-pd plan` prints."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from vllm_ascend_pd.core.ascend import BUFFER_MB
from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.figures import (
    Piece,
    PlanFigures,
    RateFigures,
    SenderFigures,
)
from vllm_ascend_pd.tools.plan.model import whole

_WIDTH = 120


def render(plan: PlanFigures) -> str:
    console = Console(width=_WIDTH, highlight=False, markup=False, soft_wrap=False)
    with console.capture() as capture:
        console.print(_headline(plan))
        if plan.layer_kinds:
            console.print(_layer_kinds(plan))
        console.print(_senders(plan))
        console.print(_prompt(plan))
        console.print(_write_times(plan))
        if plan.rates is not None:
            console.print(_rates(plan.rates))
        for note in plan.notes:
            console.print(f"- {note}")
    return capture.get().rstrip()


def _headline(plan: PlanFigures) -> str:
    model = plan.model
    heads = "MLA's latent" if model.mla else f"{model.kv_heads} KV heads"
    widths = " + ".join(map(str, model.widths))
    if plan.layer_kinds:
        windows = sum(kind.layers * kind.window_bytes for kind in plan.layer_kinds)
        return (
            f"{model.name}: {len(model.cached)} layers with compressed caches, latents of {widths} "
            f"{model.dtype}\n"
            f"{plan.bytes_per_token:,} bytes per token, and {_size(windows)} per prompt for windows"
        )
    return (
        f"{model.name}: {model.cached_layers} of {len(model.cached)} layers cache {heads}, {widths} "
        f"{model.dtype} each\n"
        f"{plan.bytes_per_token:,} bytes per token, {plan.bytes_per_token_and_layer:,} of them per layer"
    )


def _layer_kinds(plan: PlanFigures) -> Table:
    table = Table(title="layers")
    step = f"a step of {plan.staging.step_tokens} tokens"
    for column in ("tokens per entry", "layers", "bytes per token", "windows, once per prompt", step):
        table.add_column(column)
    for kind in plan.layer_kinds:
        ratio = str(kind.tokens_per_entry) if kind.tokens_per_entry > 1 else "window only"
        sizes = (
            f"{kind.bytes_per_token:,}",
            _size(kind.window_bytes),
            _size(whole(kind.bytes_per_token * plan.staging.step_tokens)),
        )
        table.add_row(ratio, str(kind.layers), *sizes)
    return table


def _engine(engine: PlannedEngine) -> str:
    sizes = [f"TP {engine.tp}"]
    sizes += [f"PP {engine.pp}"] if engine.pp > 1 else []
    sizes += [f"DP {engine.dp}"] if engine.dp > 1 else []
    return " ".join(sizes)


def _senders(plan: PlanFigures) -> Table:
    table = Table(title=f"prefill {_engine(plan.prefill)} -> decode {_engine(plan.decode)}")
    table.add_column("prefill rank")
    table.add_column("KV heads")
    table.add_column("regrouping")
    table.add_column(f"of every {plan.unit_tokens} tokens of a layer, by tensor")
    alike: dict[tuple[object, ...], list[SenderFigures]] = {}
    for sender in plan.senders:
        # Replicas serve alternating requests and share a row, unless they are in different groups.
        key = (sender.first_head, sender.stop_head, sender.regroup, sender.exchanges_with, sender.pieces)
        alike.setdefault(key, []).append(sender)
    for senders in alike.values():
        first = senders[0]
        ranks = _ranks([sender.tp_rank for sender in senders])
        regrouping = {
            "none": "none",
            "gather": f"all-to-all of [{_ranks(first.exchanges_with)}], of 1/{len(first.exchanges_with)} of the units",
            "split": "dealt out",
            "quantize": "quantized",
        }[first.regroup]
        table.add_row(
            f"one of {ranks}" if len(senders) > 1 else ranks,
            "latent" if plan.model.mla else _ranks(range(first.first_head, first.stop_head)),
            regrouping,
            _pieces(first.pieces),
        )
    return table


def _pieces(pieces: Iterable[Piece]) -> str:
    """Returns one line for all tensors. Decode ranks that get the same are listed together."""
    by_target: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_target.setdefault(piece.to, []).append(piece)
    by_content: dict[str, list[int]] = {}
    for rank, got in by_target.items():
        by_content.setdefault(" + ".join(_size(p.nbytes) for p in got), []).append(rank)
    return "; ".join(
        f"{content} to {'each of ' if len(ranks) > 1 else ''}{_ranks(ranks)}" for content, ranks in by_content.items()
    )


def _prompt(plan: PlanFigures) -> Table:
    prompt, staging = plan.prompt, plan.staging
    table = Table(
        title=f"a prompt of {prompt.tokens} tokens ({prompt.units} units of {plan.unit_tokens})", show_header=False
    )
    lanes = plan.senders[0].lanes
    taking_turns = f"; {lanes} ranks take turns" if lanes > 1 else ""
    table.add_row("sent in all", _size(prompt.nbytes))
    table.add_row("by a prefill rank at most", _size(prompt.busiest_sender) + taking_turns)
    table.add_row("to a decode rank at most", _size(prompt.busiest_reader))
    table.add_row(
        "descriptors", f"{prompt.descriptors:,}; {prompt.descriptors_contiguous:,} if all blocks are neighbours"
    )
    groups = " ".join(f"[{_ranks(group)}]" for group in plan.all_to_all) or "none"
    table.add_row("all-to-all groups", f"{groups} ({plan.groups_created} created, for any decode engine)")
    slots = f"{staging.slots} slots of {_size(staging.slot_bytes)} for {staging.step_tokens} tokens, and 2 as large"
    table.add_row(
        "staging memory of each prefill rank", f"{_size(staging.total_bytes)} ({slots})" if staging.slots else "none"
    )
    if staging.groups:
        buffers = f"2 x {BUFFER_MB} MiB for each of {staging.groups} groups, beside vLLM's cache"
        table.add_row("HCCL memory of each prefill rank", f"{_size(staging.communicator_bytes)} ({buffers})")
    return table


def _write_times(plan: PlanFigures) -> Table:
    computed = ""
    if plan.compute_ms is not None:
        computed = f"; prefill computes it in {plan.compute_ms / len(plan.model.cached):.2f} ms"
    table = Table(title=f"a layer's writes{computed}")
    for column in ("chip, link", "engine", "all blocks neighbours", "no blocks neighbours", "all-to-all", "limited by"):
        table.add_column(column)
    for time in plan.write_times:
        exchange = (
            "unknown" if time.exchange_ms is None else f"{time.exchange_ms:.3f} ms" if time.exchange_ms else "none"
        )
        times = (f"{time.contiguous_ms:.3f} ms", f"{time.scattered_ms:.3f} ms", exchange)
        table.add_row(f"{time.chip}, {time.link}", time.engine, *times, time.limited_by)
    return table


def _rates(rates: RateFigures) -> Table:
    table = Table(title="requests/s of one engine", show_header=False)
    table.add_row("request", f"{rates.prompt_tokens} + {rates.output_tokens} tokens")
    parts = {
        "prefill: computing": rates.prefill_compute,
        "prefill: link": rates.prefill_link,
        "decode: steps": rates.decode_steps,
        "decode: KV cache": rates.decode_kv,
        "decode: link": rates.decode_link,
    }
    for part, rate in parts.items():
        table.add_row(part, f"{rate:.2f}")
    table.add_section()
    table.add_row("prefill engines per decode engine", f"{rates.prefill_per_decode:.2f}")
    for side in ("prefill", "decode"):
        limit = min((part for part in parts if part.startswith(side)), key=lambda part: parts[part])
        table.add_row(f"{side} is limited by", limit.removeprefix(f"{side}: "))
    return table


def _ranks(numbers: Sequence[int]) -> str:
    """Shortens runs of three and more numbers: 0-3, 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _size(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"
