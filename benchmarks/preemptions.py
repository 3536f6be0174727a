# SPDX-License-Identifier: Apache-2.0
"""Measures what preemptions on decode cost, and checks the answers: ours and vllm-ascend's own connector.

$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/preemptions.py [--rounds 3] [--requests 8] [--folder DIR]
      [--check] [--json]

vllm-ascend on emulated CANN libraries, with its recompute scheduler on decode (`recompute_scheduler_enable`). A decode
engine has 9 blocks of 128 tokens. Streams of 200 tokens after prompts of 100 to 149 begin in one or two blocks each and
end in three, so that some are preempted.

ours       LayerwisePushConnector behind `vllm-ascend-pd proxy`: prefill gets a preempted request's tokens so far
layerwise  vllm-ascend's MooncakeLayerwiseConnector behind a stand-in for its layerwise proxy
           (tests/harness/layerwise_proxy.py): decode ends a preempted request, and the proxy asks again with its text

The two take turns, with the same prompts. The idle one is stopped (SIGSTOP). All tokens are characters that no other
token contains, so that text becomes the same tokens again.

Wrong answers are those with another number of tokens, or with tokens that a single engine does not choose after those
before them. Each is compared from four places on. `lost` is the time that streams stood still, by preemption: pauses of
more than ten times the median time between tokens.

Preemptions are counted by vLLM's metric for ours, and by the proxy for theirs.

With --check, the exit code is 1 if an answer of ours is wrong, or ours loses more than 1.25 times the other's time. It
is also 1 if a side is not preempted, or fails.
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

import httpx  # noqa: E402
from helpers.report import need_emulated_npu  # noqa: E402
from helpers.ttft_sides import Pair, PeerEngine, Side, SideFailedError, sizes_of  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from harness import ascend  # noqa: E402
from harness.agreement import LISTED, parts_agree  # noqa: E402
from harness.client import Completion, at_once  # noqa: E402
from harness.clusters import ClusterConfig, running_cluster  # noqa: E402
from harness.engines import PATIENT, Engine, EngineConfig, Role, running_engines  # noqa: E402
from harness.layerwise_proxy import layerwise_proxy  # noqa: E402
from harness.models import TINY, for_npu, make_model  # noqa: E402
from harness.processes import StartupError, interrupt_on_sigterm  # noqa: E402

SPEC = for_npu(TINY)
BLOCK, BLOCKS = 128, 9
ANSWER = 200
PLACES, COMPARED = (0, 60, 120, 184), 16
"""Where in an answer its tokens are compared with a single engine's, and how many there."""
ALPHABET = "0123456789 .,:;!?+-*/"
"""The tokenizer has no token of two of these."""
LONG_PAUSE = 10.0
"""Times the median time between tokens."""
LOST_TIMES = 1.25
"""The bar: times the other's time lost by preemption. It is above 1 so that noise does not decide."""
FEW_BLOCKS = EngineConfig(
    role=Role.DECODE,
    max_model_len=640,
    kv_cache_bytes=BLOCKS * BLOCK * SPEC.kv_bytes_per_token,
    who_computes=None,
    args=("--additional-config", json.dumps({"recompute_scheduler_enable": True})),
)


@dataclass(frozen=True)
class Row:
    """One side, over all rounds."""

    side: str
    answers: int
    # Answers with another number of tokens than asked for.
    wrong_length: int
    # Of the others: answers with tokens that a single engine does not choose, and the share of places compared.
    wrong_tokens: int
    compared: float
    # Requests without an answer.
    failed: int
    preemptions: int
    # Seconds that streams stood still, by preemption. 0 without any.
    lost_s: float
    # Seconds that a round took: the median.
    round_s: float

    @property
    def is_right(self) -> bool:
        return not (self.wrong_length or self.wrong_tokens or self.failed)

    def __str__(self) -> str:
        return (
            f"{self.side:<10}{self.answers:>4} answers: {self.wrong_length:>3} too long or short, "
            f"{self.wrong_tokens:>3} with wrong tokens ({self.compared:.0%} compared), {self.failed:>3} failed  "
            f"{self.preemptions:>3} preemptions, {self.lost_s:.2f} s lost by each; {self.round_s:.1f} s a round"
        )


@dataclass
class Tally:
    """What a side has answered so far. `count`: returns how many preemptions there were since its start."""

    side: Side
    count: Callable[[], int]
    answers: list[tuple[list[int], Completion]] = dataclasses.field(default_factory=list)
    failed: int = 0
    preemptions: int = 0
    round_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def lost_s(self) -> float:
        """Seconds, by preemption."""
        return sum(stood_still(answer.arrivals) for _, answer in self.answers) / max(1, self.preemptions)


@contextmanager
def ours(model: Path, logs: Path) -> Iterator[Tally]:
    prefill = EngineConfig(role=Role.PREFILL, connector_extra=PATIENT)
    decode = dataclasses.replace(FEW_BLOCKS, connector_extra=PATIENT)
    config = ClusterConfig("ours", (_emulated(prefill),), (_emulated(decode, 2),), model=SPEC)
    with running_cluster(model, config, logs) as cluster:
        [engine] = cluster.decode
        with _side("ours", cluster.url, model, [*cluster.prefill, engine]) as side:
            yield Tally(side, lambda: int(engine.metric("vllm:num_preemptions_total")))


@contextmanager
def layerwise(model: Path, logs: Path) -> Iterator[Tally]:
    transfer = (("kv_connector", "MooncakeLayerwiseConnector"), *sizes_of(Pair(1, 1)))
    prefill = PeerEngine(role=Role.PREFILL, transfer=transfer)
    decode = PeerEngine(**(asdict(FEW_BLOCKS) | {"transfer": transfer}))
    with (
        running_engines(model, [_emulated(prefill), _emulated(decode, 2)], logs) as engines,
        layerwise_proxy(*(engine.url for engine in engines)) as proxy,
        _side("layerwise", proxy.url, model, engines) as side,
    ):
        yield Tally(side, lambda: proxy.recomputed)


@contextmanager
def single(model: Path, logs: Path) -> Iterator[Side]:
    """An engine with room for everything."""
    config = _emulated(EngineConfig(max_model_len=640), 4)
    with running_engines(model, [config], logs) as [engine], _side("single", engine.url, model, [engine]) as side:
        yield side


def _emulated(config: EngineConfig, first_device: int = 0) -> EngineConfig:
    return ascend.emulated(dataclasses.replace(config, env=ascend.UNPINNED), first_device)


def _side(name: str, url: str, model: Path, engines: Sequence[Engine]) -> AbstractContextManager[Side]:
    return closing(Side(name, url, model, [engine.process for engine in engines], LISTED))


def stood_still(arrivals: Sequence[float]) -> float:
    """Returns how long a stream's long pauses took, without the time that a token takes anyway. 0 without pauses."""
    pauses = [later - earlier for earlier, later in pairwise(arrivals)]
    if not pauses:
        return 0.0
    usual = median(pauses)
    return sum(pause - usual for pause in pauses if pause > LONG_PAUSE * usual)


def ask_all(tally: Tally, prompts: Sequence[str], tokens_of: Callable[[str], list[int]]) -> None:
    """One round."""
    allowed = tokens_of(ALPHABET)

    def ask(prompt: str) -> Completion | None:
        try:
            return tally.side.ask(prompt, ANSWER, allowed_token_ids=allowed)
        except SideFailedError as error:
            print(error, file=sys.stderr)
            return None

    with tally.side.turn():
        before, begun = tally.count(), time.monotonic()
        for prompt, answer in zip(prompts, at_once(ask, prompts, concurrency=len(prompts)), strict=True):
            if answer is None:
                tally.failed += 1
            else:
                tally.answers.append((tokens_of(prompt), answer))
        tally.round_s.append(time.monotonic() - begun)
        tally.preemptions += tally.count() - before


def judge(judging: Side, prompt: list[int], answer: Completion, allowed: list[int]) -> tuple[int, bool]:
    """Returns how many tokens of an answer could be compared, and whether all of them are right."""

    def expected(place: int) -> Completion:
        return judging.ask([*prompt, *answer.token_ids[:place]], COMPARED, allowed_token_ids=allowed)

    return parts_agree(answer, {place: expected(place) for place in PLACES})


def row(tally: Tally, judging: Side, allowed: list[int]) -> Row:
    whole = [(prompt, answer) for prompt, answer in tally.answers if len(answer.token_ids) == ANSWER]
    with judging.turn():
        judged = [judge(judging, prompt, answer, allowed) for prompt, answer in whole]
    return Row(
        side=tally.side.name,
        answers=len(tally.answers),
        wrong_length=len(tally.answers) - len(whole),
        wrong_tokens=sum(not right for _, right in judged),
        compared=sum(places for places, _ in judged) / max(1, len(judged) * len(PLACES) * COMPARED),
        failed=tally.failed,
        preemptions=tally.preemptions,
        lost_s=tally.lost_s,
        round_s=median(tally.round_s),
    )


def measure(model: Path, logs: Path, rounds: int, requests: int) -> list[Row]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens_of(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text).ids]

    with single(model, logs) as judging, ours(model, logs) as first, layerwise(model, logs) as second:
        for number in range(rounds):
            chosen = random.Random(number)
            prompts = ["".join(chosen.choices(ALPHABET, k=100 + 7 * i)) for i in range(requests)]
            for tally in (first, second):
                ask_all(tally, prompts, tokens_of)
        return [row(tally, judging, tokens_of(ALPHABET)) for tally in (first, second)]


def misses(rows: Sequence[Row]) -> Iterator[str]:
    mine, theirs = rows
    if not mine.is_right:
        yield "ours: an answer is wrong or missing"
    if mine.lost_s > LOST_TIMES * theirs.lost_s:
        yield f"ours loses more than {LOST_TIMES} times the other's time by preemption"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="at a time, up to 8")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint and the engines' logs")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    args = parser.parse_args()
    need_emulated_npu(parser)
    if not (args.rounds > 0 and 0 < args.requests <= 8):
        parser.error("--rounds must be positive, --requests 1 to 8")
    interrupt_on_sigterm()
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            rows = measure(make_model(SPEC, folder / "models"), logs, args.rounds, args.requests)
        except StartupError as error:
            print(error.summary, file=sys.stderr)
            return 1
        except (SideFailedError, httpx.HTTPError) as error:
            print(f"an engine ended: {error}", file=sys.stderr)
            return 1
    for each in rows:
        print(json.dumps(asdict(each)) if args.json else each)
    failures = [f"{each.side} was not preempted" for each in rows if not each.preemptions]
    failures += misses(rows) if args.check else []
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
