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
    assert {Path(program).stem for program, *options in started if "--npu" in options} == on_npu - {"ttft"}  # minutes
    assert len(started) == len(programs) + len(on_npu) - 1
    (tmp_path / "venv/bin/python").write_text("#!/usr/bin/env bash\nexit 3\n")
    status, said = run()
    assert status == 1
    assert "FAILED   push" in said
    assert run("--wrong")[0] == 2


def test_ops() -> None:
    found = results("benchmarks/ops.py", "--tokens", "128", "--ratios", "2", "--threads", "1")
    assert [each["op"] for each in found] == ["gather_slices", "interleave_heads", "split_heads"]
    assert all(each["of_copy"] > 0 for each in found)


@pytest.mark.long
def test_regroup() -> None:
    """Each side is checked for the right bytes before it is measured."""
    _, program = documented("docs/performance.md", "python benchmarks/regroup.py")
    *layers, gather, interleave = results(program, "--tokens", "64", "1024", "--ranks", "2", "--seconds", "0.1")
    assert [(each["ranks"], each["tokens"]) for each in layers] == [(2, 64), (2, 1024)]
    for each in layers:
        assert each["rounds"] >= 5
        assert 0 < each["ours_outside_ms"] < each["ours_ms"]
        assert 0 < each["reference_outside_ms"] < each["reference_ms"]
        assert each["gain"] > 0
    assert (gather["op"], interleave["op"]) == ("gather_slices", "interleave_heads")


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
    assert all(first_token[way] > 0 for way in ("direct_ms", "bare_ms", "floor_ms", "proxy_ms", "of_direct"))
    assert first_token["added_ms"] == first_token["proxy_ms"] - first_token["direct_ms"]
    assert (cpu["measure"], cpu["asked"], cpu["failed"]) == ("cpu", 40, 0)
    assert cpu["share"] > 0
    assert cpu["ms_per_request"] > 0
    assert cpu["of_engine"] > 0
    assert cpu["of_floor"] > 0
    # None of them gets its second token before all have had the first, or else it fails.
    assert (streams["measure"], streams["streams"], streams["failed"]) == ("streams", STREAMS, 0)
