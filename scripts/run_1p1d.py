# SPDX-License-Identifier: Apache-2.0
"""Starts one prefill engine, one decode engine and the proxy, and compares them with a single vLLM instance."""

import dataclasses
import enum
import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, TypeVar

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import ascend
from harness.agreement import compare, listed_logprobs
from harness.client import Client, Completion, StreamError, random_prompt
from harness.clusters import Cluster, ClusterConfig, running_cluster
from harness.engines import Engine, EngineConfig, Role, running_engines
from harness.models import DEMO, TINY, ModelSpec, for_npu, make_model
from harness.ports import is_free
from harness.processes import ManagedProcess, StartupError, interrupt_on_sigterm
from vllm_ascend_pd.observe.trace_file import TraceError
from vllm_ascend_pd.tools.timeline.command import show_timeline

T = TypeVar("T")
Size = tuple[int, int]  # of tensor and pipeline parallelism

OUTPUT_TOKENS = 32
KV_BYTES = 8 << 30
"""An NPU's KV cache: room for the prompts above. vLLM's own choice is more than HIXL documents for transfers."""
END_SECONDS = 5.0
"""Seconds in which a server ends after its engine has died."""

console = Console()
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Device(enum.StrEnum):
    CPU = "cpu"
    NPU = "npu"


class DemoError(RuntimeError):
    """Ends the program with this message."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result."""

    prompt_tokens: int
    streamed: Completion
    whole: Completion
    decode_seconds: float
    """Of both requests, from the first to the last token as the decode engine measures it: a busy server may hand
    several tokens to its client at once."""
    equal: bool

    def cells(self) -> tuple[str, ...]:
        transfer = self.whole.kv_transfer_params or {}
        received = transfer.get("received_bytes")
        early = f"{transfer['bytes_before_prefill_end'] / received:.0%}" if received else "-"
        return (
            str(self.prompt_tokens),
            f"{self.streamed.ttft * 1000:.0f}",
            f"{2 * (OUTPUT_TOKENS - 1) / self.decode_seconds:.0f}" if self.decode_seconds else "-",
            early,
            "[green]yes[/]" if self.equal else "[red]no[/]",
        )


@app.command()
def main(
    device: Annotated[Device, typer.Option(help="Where the engines run.")] = Device.CPU,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="With --device npu: vllm-ascend on emulated NPUs.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Model folder. Default: a small model with random weights."),
    ] = None,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of the prefill engine.")] = 2,
    prefill_pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size of the prefill engine.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of the decode engine.")] = 1,
    decode_pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size of the decode engine.")] = 1,
    port: Annotated[
        int,
        typer.Option(
            min=1024, max=51000, help="Port of the proxy. The engines use +100 and +200, and +14001 and +14101 for KV."
        ),
    ] = 8000,
    timeline: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for a picture of the longest request, and its traces.")
    ] = Path("timeline"),
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of the prompts, separated by commas. Those that the model supports are used.")
    ] = "16,128,500,1000,2000",
    keep: Annotated[bool, typer.Option("--keep", help="Keep running until Ctrl-C.")] = False,
    verify_kv: Annotated[
        bool, typer.Option("--verify-kv", help="Compare what decode receives with what prefill computed.")
    ] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="On NPUs: prefill and decode capture graphs.")] = False,
    prefill_args: Annotated[str, typer.Option(help="More arguments of `vllm serve` for the prefill engine.")] = "",
    decode_args: Annotated[str, typer.Option(help="The same for the decode engine and the single instance.")] = "",
    start_seconds: Annotated[float, typer.Option(min=1, help="Timeout in seconds for the start of an engine.")] = 600,
) -> None:
    """Start one prefill and one decode engine behind the proxy, compare them with a single vLLM instance, and show
    where the time of the requests went.

    Exits with 0 only if every output is equal, token by token. On NPUs, which compute in bfloat16, tokens that are a
    near-tie may differ.
    """
    interrupt_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="vllm-ascend-pd-"))
    succeeded = False
    try:
        prefill, decode = engine_configs(
            device,
            emulate=emulate,
            tiny=model is None,
            sizes=((prefill_tp, prefill_pp), (decode_tp, decode_pp)),
            port=port,
            args=(prefill_args, decode_args),
        )
        if graphs:
            prefill, decode = (dataclasses.replace(each, eager=False) for each in (prefill, decode))
        if verify_kv:
            prefill, decode = (
                dataclasses.replace(each, connector_extra=(*each.connector_extra, ("verify_kv", "all")))
                for each in (prefill, decode)
            )
        check_ports(port, prefill, decode)
        with console.status("making a small random model") if model is None else nullcontext():
            path = model or make_model(own_model(device, emulate=emulate), folder)
        traces = timeline.absolute() / time.strftime("%Y%m%d-%H%M%S")  # what an earlier run has left is not mixed in
        lengths = tuple(map(int, prompt_tokens.split(",")))
        demo = Demo(path, prefill, decode, port, folder, traces, start_seconds, lengths)
        succeeded = demo.run(keep)
    except KeyboardInterrupt:
        console.print("interrupted")
        shutil.rmtree(folder, ignore_errors=True)
        raise typer.Exit(130) from None
    except (DemoError, StartupError, StreamError, TraceError, ValueError, OSError, httpx.HTTPError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
    if not succeeded and any(folder.glob("*.log")):
        console.print(f"the engines' logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(0 if succeeded else 1)


def own_model(device: Device, *, emulate: bool) -> ModelSpec:
    """Creates the model with random weights: in bfloat16 for NPUs, and smaller for emulated NPUs."""
    spec = TINY if emulate else DEMO
    return for_npu(spec) if device is Device.NPU else spec


def engine_configs(
    device: Device, *, emulate: bool, tiny: bool, sizes: tuple[Size, Size], port: int, args: tuple[str, str]
) -> tuple[EngineConfig, EngineConfig]:
    """Returns the prefill and the decode engine."""
    if emulate and device is not Device.NPU:
        raise DemoError("--emulate goes with --device npu")
    if device is Device.NPU and not emulate and (problems := ascend.problems()):
        raise DemoError("cannot run on NPUs here:\n" + "\n".join(f"- {problem}" for problem in problems))
    configs = []
    first_devices = ascend.first_devices([EngineConfig(tp=tp, pp=pp) for tp, pp in sizes])
    roles = (Role.PREFILL, Role.DECODE)
    for i, (role, (tp, pp), first_device) in enumerate(zip(roles, sizes, first_devices, strict=True)):
        config = EngineConfig(
            role=role,
            tp=tp,
            pp=pp,
            device=device.value,
            port=port + 100 * (i + 1),
            kv_port=port + 14001 + 100 * i,
            args=tuple(shlex.split(args[i])),
        )
        if not tiny:  # a real model decides its sizes itself
            config = dataclasses.replace(
                config, dtype="auto", max_model_len=None, max_num_batched_tokens=None, eager=device is Device.NPU
            )
        if emulate:
            config = ascend.emulated(config, first_device)
        elif device is Device.NPU:
            env = tuple(ascend.engine_env(first_device, tp * pp).items())
            config = dataclasses.replace(
                config, dtype=ascend.DTYPE if tiny else config.dtype, block_size=None, kv_cache_bytes=KV_BYTES, env=env
            )
        else:
            config = dataclasses.replace(config, kv_cache_bytes=2 << 30)
            if tiny:  # the whole prompt in one step: a clear picture
                config = dataclasses.replace(config, kv_cache_bytes=256 << 20, max_num_batched_tokens=4096)
        configs.append(config)
    return configs[0], configs[1]


def check_ports(port: int, *engines: EngineConfig) -> None:
    ports = [port, *(p for engine in engines for p in (engine.port, engine.kv_port) if p)]
    if taken := [str(p) for p in ports if not is_free(p)]:
        raise DemoError(f"ports in use: {', '.join(taken)}; choose others with --port")


@dataclasses.dataclass(frozen=True)
class Demo:
    """Runs a single instance first, then prefill and decode, and compares them."""

    model: Path
    prefill: EngineConfig
    decode: EngineConfig
    port: int
    folder: Path
    traces: Path
    start_seconds: float
    prompt_tokens: tuple[int, ...]

    def run(self, keep: bool) -> bool:
        """Prints the table. Returns whether all outputs are equal."""
        single = dataclasses.replace(self.decode, role=Role.SINGLE, port=None, kv_port=None)
        with running_engines(self.model, [single], self.folder, print_ready, self.start_seconds) as [engine]:
            pairs = self.prompts(engine.url)
            with naming_who_ended([engine.process]), self.client(engine.url) as client:
                expected = [
                    tuple(client.complete(prompt, OUTPUT_TOKENS) for prompt in pair)
                    for pair in track(pairs, "single instance")
                ]
        recording = (("trace_dir", str(self.traces)),)
        prefill, decode = (
            dataclasses.replace(engine, connector_extra=(*engine.connector_extra, *recording))
            for engine in (self.prefill, self.decode)
        )
        config = ClusterConfig("1p1d", prefill=(prefill,), decode=(decode,))
        start = (self.port, print_ready, self.start_seconds)
        with folder_for(self.traces), running_cluster(self.model, config, self.folder, *start) as cluster:
            with naming_who_ended(processes(cluster)), self.client(cluster.url) as client:
                client.complete(random_prompt(200, "warm-up"), OUTPUT_TOKENS)
                rows = [
                    measure(client, cluster.decode[0], pair, outputs)
                    for pair, outputs in track(list(zip(pairs, expected, strict=True)), "prefill and decode")
                ]
            console.print(table(rows))
            time.sleep(0.5)  # the engines write their traces a little later
            show_timeline(self.traces, None, console, warm_ups=1)
            if keep:
                console.print(f"serving at {cluster.url}, logs in {self.folder}; Ctrl-C ends it.")
                console.print(f"In a browser, {cluster.url}/ shows what it does. Try:")
                console.print(curl(cluster.url, self.model), soft_wrap=True, highlight=False)
                with suppress(KeyboardInterrupt):
                    wait_for_failure(processes(cluster))
        equal = all(row.equal for row in rows)
        if not equal:
            console.print("[red]outputs differ from the single instance's[/]")
        return equal

    def client(self, url: str) -> Client:
        return Client(url, str(self.model), logprobs=listed_logprobs(self.decode.dtype))

    def prompts(self, url: str) -> list[tuple[list[int], list[int]]]:
        """Returns two prompts of each length that the model supports."""
        from transformers import AutoConfig

        card = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"][0]
        longest = card["max_model_len"] - OUTPUT_TOKENS
        vocabulary = AutoConfig.from_pretrained(self.model).get_text_config().vocab_size
        return [
            (random_prompt(tokens, "streamed", vocabulary), random_prompt(tokens, "whole", vocabulary))
            for tokens in self.prompt_tokens
            if tokens <= longest
        ]


def measure(
    client: Client, decode: Engine, prompts: tuple[list[int], list[int]], expected: tuple[Completion, ...]
) -> Row:
    """Sends one streaming request for the TTFT, and one for the decode engine's report about the transfer."""
    before = decode.metric("vllm:request_decode_time_seconds_sum")
    streamed = client.complete(prompts[0], OUTPUT_TOKENS, stream=True)
    whole = client.complete(prompts[1], OUTPUT_TOKENS)
    decode_seconds = decode.metric("vllm:request_decode_time_seconds_sum") - before
    equal = not any(compare(ours, theirs)[1] for ours, theirs in zip((streamed, whole), expected, strict=True))
    return Row(len(prompts[0]), streamed, whole, decode_seconds, equal)


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Iterates, with a progress line."""
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield from progress.track(items)


def table(rows: list[Row]) -> Table:
    """Returns the result as a table."""
    result = Table(title="prefill and decode apart, through the proxy")
    headings = (
        "prompt tokens",
        "TTFT (ms)",
        "decode tokens/s",
        "KV in D before prefill ended",
        "equal to a single instance",
    )
    for heading in headings:
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(*row.cells())
    return result


def print_ready(process: ManagedProcess, seconds: float) -> None:
    console.print(f"{process.name} ready after {seconds:.0f} s")


def curl(url: str, model: Path) -> str:
    body = json.dumps({"model": str(model), "prompt": [5, 6, 7], "max_tokens": 8})
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def processes(cluster: Cluster) -> list[ManagedProcess]:
    return [server.process for server in (*cluster.prefill, *cluster.decode, cluster.proxy)]


def ended(running: Sequence[ManagedProcess]) -> str:
    """Returns which processes ended by themselves, with their exit codes and last output, or ""."""
    return "\n\n".join(
        f"{process.name} ended with code {process.exit_code}; {process.account()}"
        for process in running
        if process.exit_code is not None
    )


@contextmanager
def naming_who_ended(running: Sequence[ManagedProcess]) -> Iterator[None]:
    """Raises DemoError with the reason if a request fails because a server has ended."""
    try:
        yield
    except (StreamError, httpx.HTTPError) as error:
        deadline = time.monotonic() + END_SECONDS
        while not (why := ended(running)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not why:
            raise
        raise DemoError(f"{error}\n{why}") from error


@contextmanager
def folder_for(traces: Path) -> Iterator[None]:
    """Creates the folder, and removes it at the end if it is empty."""
    made = [folder for folder in (traces, *traces.parents) if not folder.exists()]
    traces.mkdir(parents=True)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


def wait_for_failure(running: Sequence[ManagedProcess]) -> None:
    """Waits until Ctrl-C is pressed or a process ends by itself. Ends only by an exception."""
    while not (why := ended(running)):
        time.sleep(1)
    raise DemoError(why)


if __name__ == "__main__":
    app()
