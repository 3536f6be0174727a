# SPDX-License-Identifier: Apache-2.0
"""The real vllm-ascend on the NPU gives the answers of vLLM's CPU backend. All tests above it rely on that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ascend
from harness.agreement import compare
from harness.client import Completion
from harness.engines import CPU_ENV, plugins_on_path
from harness.models import TINY, for_npu, make_model
from harness.prefork import METHOD

pytestmark = [pytest.mark.npu, pytest.mark.long]

TOLERANCE = 0.3
"""bfloat16 is up to 0.16 from float32, as measured; two engines in bfloat16 are closer to each other."""
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("offline_tokens.py")
CPU_PYTHON = Path(os.environ.get("VENV", ROOT / ".venv")) / "bin" / "python"
"""Of the environment that scripts/setup_env.sh makes."""


def answers_of(python: Path, model: Path, tp: int, pp: int, *, cpu: bool) -> tuple[str, list[list[Completion]]]:
    """Which device, and per round and prompt the answer."""
    env = {**os.environ, **CPU_ENV, **plugins_on_path(), METHOD: "fork", "TORCH_COMPILE_DISABLE": "1"}
    if cpu:
        env.pop("CANN_ON_HOST", None)
    command = [str(python), str(PROGRAM), str(model), str(tp), str(pp), "float32" if cpu else ascend.DTYPE]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    for line in result.stdout.splitlines():
        if line.startswith("RESULT "):
            said = json.loads(line.removeprefix("RESULT "))
            return said["device"], [[completion(*answer) for answer in answers] for answers in said["answers"]]
    raise AssertionError(f"no tokens; the end of its output:\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}")


def completion(tokens: list[int], listed: list[list[tuple[int, float]]]) -> Completion:
    return Completion(tuple(tokens), "", "length", logprobs=tuple(map(dict, listed)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(for_npu(TINY), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Completion]:
    """Returns the answers of vLLM's CPU backend, without parallelism."""
    if not CPU_PYTHON.exists():
        pytest.skip(f"needs vLLM's CPU backend in {CPU_PYTHON.parents[1]}: run scripts/setup_env.sh")
    device, (first, second) = answers_of(CPU_PYTHON, model, 1, 1, cpu=True)
    assert device == "cpu"
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    return first


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=["tp1", "tp2", "pp2"])
def test_answers_are_those_of_the_cpu_backend(model: Path, expected: list[Completion], tp: int, pp: int) -> None:
    device, rounds = answers_of(Path(sys.executable), model, tp, pp, cpu=False)
    assert device == "npu"
    for answers in rounds:
        results = [compare(ours, theirs, TOLERANCE) for ours, theirs in zip(answers, expected, strict=True)]
        assert [wrong for _, wrong in results if wrong] == []
