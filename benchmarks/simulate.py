# SPDX-License-Identifier: Apache-2.0
"""Simulates clusters of prefill and decode engines: time to first token, links, queues, and which side is short.

$ python benchmarks/simulate.py [--clusters 1:1 2:1] [--loads 0.5 0.8] [--json] [--seed 1] ...
$ python benchmarks/simulate.py --validate [--check] [--json]

Simulated are discrete events: requests come at random times (Poisson), wait, are computed, and their KV shares links.
Real are our planner (which ranks write how many bytes to which, in how many descriptors), our tickets' state machines
on both sides (grants, leases, reports) and the proxy's strategies. How long things take is given by options;
docs/simulator.md says where the defaults are from.

--clusters P:D ...  so many prefill engines to so many decode deployments (of --decode-dp engines each)
--loads             relative to what the side that is full first could serve; or --rate in requests per second
--cells             so many such clusters side by side, each with its own proxy; --rate is that of all of them
--validate          runs real workers of ours over TCP, without a model, and compares with what the simulator says

With --validate --check, exits with 1 where a percentile, or the median of the time from prefill's end until decode has
all KV, is more than 20 % off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "tests")]

from simulation.cluster import Costs, Setup  # noqa: E402
from simulation.engines import DecodeSpeed, PrefillSpeed  # noqa: E402
from simulation.exchange import make_exchange  # noqa: E402
from simulation.figures import Advice, Figures, Queue, advise, run  # noqa: E402
from simulation.presets import MODELS, SPEEDS, Speeds, find_model  # noqa: E402
from simulation.traffic import Lengths, poisson  # noqa: E402

from vllm_ascend_pd.proxy.routing.balance import DEFAULT_STRATEGY, STRATEGIES  # noqa: E402
from vllm_ascend_pd.tools.plan.model import PlanError  # noqa: E402

HEADER = (
    f"{'':13}{'TTFT (ms)':>24}{'KV after':>10}{'sent':>7}{'prefill':>18}{'decode':>26}{'NICs busy':>14}\n"
    f"{'P:D':>6}{'req/s':>7}{'p50':>8}{'p90':>8}{'p99':>8}{'prefill':>10}{'early':>7}"
    f"{'busy':>7}{'queue':>11}{'busy':>8}{'queue':>11}{'step':>7}{'P':>7}{'D':>7}"
)


def row(ratio: str, rate: float, figures: Figures) -> str:
    def busy(share: float) -> str:
        return f"{100 * share:.0f}%"

    def queue(waiting: Queue) -> str:
        return f"{waiting.mean:.1f} / {waiting.longest:.0f}"

    ttft = figures.ttft
    return (
        f"{ratio:>6}{rate:>7.5g}{1000 * ttft.p50:>8.0f}{1000 * ttft.p90:>8.0f}{1000 * ttft.p99:>8.0f}"
        f"{1000 * figures.after_prefill.p50:>10.2f}{100 * figures.early:>6.1f}%"
        f"{busy(figures.prefill_busy):>7}{queue(figures.prefill_queue):>11}"
        f"{busy(figures.decode_busy):>8}{queue(figures.decode_queue):>11}{figures.step_ms:>7.1f}"
        f"{100 * figures.p_link:>6.1f}%{100 * figures.d_link:>6.1f}%"
    )


def sentence(ratio: str, cells: int, figures: Figures, advice: Advice) -> str:
    failed = f"{figures.failed} of {figures.requests} requests failed; " if figures.failed else ""
    rates = {"prefill": advice.prefill, "decode": advice.decode, "P's NICs": advice.p_links, "D's NICs": advice.d_links}
    could = ", ".join(f"{part} {cells * rate:.5g}" for part, rate in rates.items())
    return (
        f"{failed}{ratio} could serve, in requests/s: {could}; {advice.full_first} is full first; "
        f"{advice.prefill_per_decode:.2g} prefill engines keep one decode deployment busy"
    )


def setups(args: argparse.Namespace) -> list[tuple[str, Setup]]:
    """Raises PlanError, OSError."""
    exchange = make_exchange(find_model(args.model), args.prefill_tp, args.decode_tp, args.ranks_per_nic)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Speeds)}
    preset = SPEEDS.get(args.model)
    if preset is None and None in given.values():
        missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
        raise PlanError(f"nothing is known of how fast {args.model} is computed: give {', '.join(missing)}")
    speeds = Speeds(**{name: getattr(preset, name) if value is None else value for name, value in given.items()})
    p_tp, d_tp = args.prefill_tp, args.decode_tp
    prefill = PrefillSpeed(1 / (speeds.prefill_tokens * p_tp), args.prefill_step_ms / 1000, args.step_tokens)
    decode = DecodeSpeed(
        step_s=speeds.decode_step_ms / 1000,
        request_s=speeds.decode_request_ms / 1000 / d_tp,
        slots=max(1, int(speeds.decode_slots * d_tp)),
        tokens=int(speeds.decode_kv_gb * 1e9 / exchange.d_token_bytes),
    )
    costs = Costs(
        nic=args.nic_gb * 1e9,
        write_s=args.write_us / 1e6,
        descriptor_s=args.descriptor_us / 1e6,
        control_s=args.control_ms / 1000,
        http_s=args.http_ms / 1000,
    )
    return [
        (f"{p}:{d}", Setup(exchange, p, d, args.decode_dp, prefill, decode, costs, args.strategy))
        for p, d in args.clusters
    ]


def simulate(args: argparse.Namespace) -> int:
    try:
        found = setups(args)
    except (PlanError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if not args.json:
        print(HEADER)
    for ratio, setup in found:
        advice = advise(setup, args.prompt.mean, args.output.mean)
        able = min(advice.prefill, advice.decode, advice.p_links, advice.d_links)
        for rate in [args.rate] if args.rate else [load * able * args.cells for load in args.loads]:
            arrivals = poisson(rate, args.seconds, args.prompt, args.output, args.seed)
            figures = run(setup, arrivals, args.warm_up * args.seconds, args.seconds, args.cells)
            if args.json:
                sizes = {"cluster": ratio, "cells": args.cells, "rate": rate, "model": args.model}
                tp = {"prefill_tp": args.prefill_tp, "decode_tp": args.decode_tp, "decode_dp": args.decode_dp}
                shown = {"measure": "simulation", **sizes, **tp, **dataclasses.asdict(figures)}
                print(json.dumps(shown | {"advice": dataclasses.asdict(advice)}), flush=True)
            else:
                print(row(ratio, rate, figures), flush=True)
        if not args.json:
            print(f"  {sentence(ratio, args.cells, figures, advice)}")
            print(
                f"  {figures.events:,} events of {len(arrivals):,} requests in {figures.took_s:.1f} s of a processor",
                flush=True,
            )
    return 0


def ratio_of(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdigit() and decode.isdigit() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2:1")
    return int(prefill), int(decode)


def positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="deepseek-r1", help=f"{', '.join(MODELS)}, or a config.json")
    add("--clusters", nargs="+", type=ratio_of, default=[(1, 1)], metavar="P:D")
    add("--cells", type=int, default=1)
    add("--prefill-tp", type=int, default=16)
    add("--decode-tp", type=int, default=4)
    add("--decode-dp", type=int, default=4)
    add("--strategy", choices=[*STRATEGIES], default=DEFAULT_STRATEGY, help="of the proxies")
    add("--loads", nargs="+", type=positive, default=[0.5, 0.8, 0.95])
    add("--rate", type=positive)
    add("--seconds", type=positive, default=600.0, help="of traffic")
    add("--warm-up", type=float, default=0.3, help="share of the seconds that does not count")
    add("--prompt", type=Lengths.parse, default=Lengths("fixed", 4096), help="tokens: fixed:N, uniform:LOW:HIGH, ...")
    add("--output", type=Lengths.parse, default=Lengths("fixed", 1500), help="... or lognormal:MEDIAN:SIGMA")
    add("--prefill-tokens", type=positive, help="computed by a rank per second")
    add("--prefill-step-ms", type=float, default=5.0, help="of a step, besides its tokens")
    add("--step-tokens", type=int, default=8192, help="at most")
    add("--decode-step-ms", type=positive, help="of a step, besides its requests")
    add("--decode-request-ms", type=positive, help="for each request per rank")
    add("--decode-slots", type=positive, help="requests per rank, at most")
    add("--decode-kv-gb", type=positive, help="of a rank")
    add("--nic-gb", type=positive, default=50.0, help="10^9 bytes per second, in either direction")
    add("--ranks-per-nic", type=int, default=2)
    add("--write-us", type=float, default=20.0, help="of a layer's write to one decode rank, besides its bytes")
    add("--descriptor-us", type=float, default=1.0)
    add("--control-ms", type=float, default=0.5, help="a side channel's message, one way")
    add("--http-ms", type=float, default=2.0, help="a request or answer between proxy and engine")
    add("--seed", type=int, default=1)
    add("--validate", action="store_true")
    add("--requests", type=int, default=60, help="with --validate: of each row")
    add("--rounds", type=int, default=3, help="with --validate: runs, which rows take in turn")
    add("--check", action="store_true", help="with --validate: exit with 1 if a bar is missed")
    add("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    counts = (
        args.cells,
        args.prefill_tp,
        args.decode_tp,
        args.decode_dp,
        args.step_tokens,
        args.ranks_per_nic,
        args.rounds,
    )
    if min(counts) < 1 or not 0 <= args.warm_up < 1 or args.requests < 10:
        parser.error("sizes must be positive, --warm-up below 1, --requests 10 or more")
    if not args.validate:
        return simulate(args)
    from simulation.validation import validate

    return validate(args.requests, args.rounds, args.seed, args.json, args.check, os.getloadavg()[0])


if __name__ == "__main__":
    sys.exit(main())
