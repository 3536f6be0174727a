# SPDX-License-Identifier: Apache-2.0
"""Benchmarks in small forms run as documented and print what they measured. No test checks speed."""

import os
import subprocess
from pathlib import Path

import pytest
from benchmark_results import results

from harness.documented import REPOSITORY, documented

STREAMS = 300

pytestmark = pytest.mark.timeout(600)  # they start processes that import torch: minutes on a busy machine


def test_run_all_starts_every_benchmark(tmp_path: Path) -> None:
    """Python is a stand-in. A benchmark that fails, or whose environment is missing, fails the script."""
    script, quick = documented("docs/performance.md", "benchmarks/run_all.sh")
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text()}

    def run(*options: str) -> tuple[int, str]:
        environment = {**os.environ, "VENV": str(tmp_path / "venv")}
        ran = subprocess.run(
            [script, *options], cwd=REPOSITORY, capture_output=True, text=True, env=environment, timeout=60
        )
        return ran.returncode, ran.stdout

    for name in ("venv", "venv-npu"):
        status, said = run()
        assert status == 1
        assert "NOT RUN  plan" in said
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").write_text(f'#!/usr/bin/env bash\necho "$*" >>{tmp_path}/log\n')
        (tmp_path / name / "bin/python").chmod(0o755)
    (tmp_path / "log").unlink()
    status, said = run(quick)
    assert status == 0, said
    started = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    on_npu = {name for name in programs if '"--npu"' in (REPOSITORY / f"benchmarks/{name}.py").read_text()}
    assert {Path(program).stem for program, *options in started if "--npu" not in options} == programs
    assert {Path(program).stem for program, *options in started if "--npu" in options} == on_npu
    assert len(started) == len(programs) + len(on_npu)
    (tmp_path / "venv/bin/python").write_text("#!/usr/bin/env bash\nexit 3\n")
    status, said = run()
    assert status == 1
    assert "FAILED   push" in said
    assert run("--wrong")[0] == 2


@pytest.mark.long
def test_regroup() -> None:
    """Each side is checked for the right bytes before it is measured."""
    _, program = documented("docs/performance.md", "python benchmarks/regroup.py")
    layers = results(program, "--tokens", "64", "1024", "--ranks", "2", "--seconds", "0.1")
    assert [(each["ranks"], each["tokens"]) for each in layers] == [(2, 64), (2, 1024)]
    for each in layers:
        assert each["rounds"] >= 5
        assert 0 < each["ours_outside_ms"] < each["ours_ms"]
        assert 0 < each["reference_outside_ms"] < each["reference_ms"]
        assert each["gain"] > 0


@pytest.mark.long
def test_token_ids() -> None:
    """Prefill gets the same prompt either way: the benchmark checks that it does."""
    _, program = documented("docs/performance.md", "python benchmarks/token_ids.py")
    short, long = results(program, "--tokens", "64", "2048", "--rounds", "2")
    assert short["tokens"] < long["tokens"]
    for each in (short, long):
        parts = ("text_proxy_ms", "text_prefill_ms", "ids_decode_ms", "ids_proxy_ms", "ids_prefill_ms", "digest_ms")
        assert all(each[part] > 0 for part in parts)
        assert each["of_text"] == pytest.approx(
            sum(each[part] for part in parts if part.startswith("ids"))
            / sum(each[part] for part in parts if part.startswith("text"))
        )
        assert 0 < each["text_bytes"] < each["ids_bytes"]


def test_proxy_overhead() -> None:
    """All streams get through."""
    _, program = documented("docs/performance.md", "python benchmarks/proxy_overhead.py")
    options = ["--requests", "3", "--rate", "40", "--seconds", "1", "--streams", str(STREAMS)]
    first_token, cpu, streams = results(program, *options)
    assert first_token["measure"] == "first token"
    assert all(first_token[way] > 0 for way in ("direct_ms", "proxy_ms", "of_direct"))
    assert first_token["added_ms"] == first_token["proxy_ms"] - first_token["direct_ms"]
    assert (cpu["measure"], cpu["asked"], cpu["failed"]) == ("cpu", 40, 0)
    assert cpu["share"] > 0
    assert cpu["ms_per_request"] > 0
    # None of them gets its second token before all have had the first, or else it fails.
    assert (streams["measure"], streams["streams"], streams["failed"]) == ("streams", STREAMS, 0)


@pytest.mark.long
def test_push() -> None:
    """The bytes of each side are compared on arrival before it is measured."""
    _, program = documented("docs/performance.md", "python benchmarks/push.py")
    small = ["--mib", "2", "--layers", "2", "--heads", "1", "--rounds", "1"]
    found = results(program, *small, "--requests", "1", "8")
    cases = [(each["requests"], each["scattered"], each["descriptor_kib"]) for each in found]
    assert cases == [(1, False, 256), (1, True, 32), (8, False, 64), (8, True, 32)]
    for each in found:
        assert all(each[side] > 0 for side in ("ours", "best"))
        assert each["of_best"] == pytest.approx(each["ours"] / each["best"])  # of the only round


@pytest.mark.long
def test_overlap() -> None:
    _, program = documented("docs/performance.md", "python benchmarks/overlap.py")
    small = ["--mib", "2", "--layers", "4", "--heads", "1", "--rounds", "2"]
    found = results(program, *small, "--compute", "2", "0.5")
    assert [(each["wanted"], each["early_bar"]) for each in found] == [(2.0, 0.5), (0.5, 0.5)]
    for each in found:
        assert 0 <= each["early"] < 1  # the last layer's bytes are never early
        assert min(each[time] for time in ("compute_ms", "push_ms", "after_ms", "bulk_after_ms")) > 0
        assert each["bulk_after_ms"] == 4 * each["push_ms"]
        assert each["ratio"] == each["compute_ms"] / each["push_ms"]
        judged = each["early"] >= each["early_bar"] and each["after_ms"] < each["after_bar_ms"]
        assert each["holds"] == (judged or each["ratio"] < 1)


@pytest.mark.long
def test_scale() -> None:
    """Every request of every wave ends well on both sides, or it fails."""
    _, program = documented("docs/performance.md", "python benchmarks/scale.py")
    sizes = ["--requests", "1", "8", "--engines", "1", "3", "--at", "4", "--rounds", "1", "--layers", "3"]
    *found, known = results(program, *sizes)
    waves = [each for each in found if each["measure"] == "wave"]
    assert [(each["requests"], each["engines"], each["spread"]) for each in waves] == [
        (1, 1, False),
        (8, 1, False),
        (4, 1, False),
        (4, 3, False),
        (4, 3, True),
    ]
    for each in waves:
        assert each["posts"] == 1
        assert each["messages"] >= 4, "a grant and a report, each with its answer"
        assert min(each[name] for name in each if name[:2] in ("p_", "d_")) > 0
    growths = [each for each in found if each["measure"] == "growth"]
    assert {(each["smaller"]["engines"], each["larger"]["engines"]) for each in growths} == {(1, 1), (1, 3)}
    assert all(each["times"] > 0 for each in growths)
    assert known["measure"] == "known engine"
    assert min(known["bytes"].values()) > 0
