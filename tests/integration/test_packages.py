# SPDX-License-Identifier: Apache-2.0
"""The sdist and its wheel, installed into clean environments as a new user would: without torch, vLLM and this
repository. Newer Pythons are tried where uv finds or gets them."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import pytest

from harness.documented import REPOSITORY

NEVER_PACKED = {".ci", ".github", ".gitignore"}


NEWER_PYTHONS = ("3.12", "3.13")
WITHOUT_NETWORK = ("error sending request", "Failed to fetch", "No interpreter found")


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@cache
def indexes_of_pip() -> dict[str, str]:
    """uv's variables."""
    said = run(sys.executable, REPOSITORY / "scripts/uv_settings.py", cwd=REPOSITORY)
    return dict(line.split("=", 1) for line in said.splitlines())


def uv(*arguments: str | Path, cwd: Path) -> str:
    """Runs uv, which takes a tenth of pip's time. Skips the test where it cannot get a newer Python or its wheels."""
    command = (Path(sys.executable).parent / "uv", *arguments, "--no-config")
    environment = os.environ | indexes_of_pip() | {"UV_HTTP_RETRIES": "0"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)
    if set(arguments) & set(NEWER_PYTHONS) and any(words in done.stderr for words in WITHOUT_NETWORK):
        pytest.skip(f"uv cannot get it: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks."""
    copy = tmp_path_factory.mktemp("tracked")
    for name in run("git", "ls-files", cwd=REPOSITORY).splitlines():
        if (REPOSITORY / name).is_file():  # not one that is being deleted
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(tracked: Path) -> Path:
    run(sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')", cwd=tracked)
    [archive] = (tracked / "dist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip and uv build it: in an environment without torch."""
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", folder, sdist, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(
    scope="module",
    params=[sys.executable, *NEWER_PYTHONS],
    ids=lambda python: python if python[0] == "3" else "this Python",
)
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The programs of an environment that has only the package and what it requires."""
    environment = tmp_path_factory.mktemp("clean")
    uv("venv", "--quiet", "--clear", "--python", request.param, environment, cwd=environment)
    uv("pip", "install", "--quiet", "--python", environment, wheel, cwd=environment)
    return environment / "bin"


@pytest.mark.parametrize("version", NEWER_PYTHONS)
def test_newer_pythons_have_a_wheel_of_each_requirement(version: str, tracked: Path) -> None:
    words = ("--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:", "--python-version", version)
    assert "msgspec==" in uv("pip", "compile", *words, "pyproject.toml", cwd=tracked)


def test_the_sdist_has_all_files(tracked: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    files = {str(path.relative_to(tracked)) for path in tracked.rglob("*") if path.is_file()}
    missing = {name for name in files - packed if not name.startswith(("dist/", "vllm_ascend_pd.egg-info/"))}
    assert {name.partition("/")[0] for name in missing} <= NEVER_PACKED


def test_it_is_clean(clean: Path, tmp_path: Path) -> None:
    listed = uv("pip", "list", "--format", "json", "--python", clean.parent, cwd=tmp_path)
    installed = {each["name"] for each in json.loads(listed)}
    assert "vllm-ascend-pd" in installed
    assert installed & {"torch", "vllm", "transformers"} == set()
    uv("pip", "check", "--python", clean.parent, cwd=tmp_path)


def test_proxy_and_tools_work_without_torch(clean: Path, tmp_path: Path) -> None:
    command = clean / "vllm-ascend-pd"
    layerwise = '{"kv_connector": "MooncakeLayerwiseConnector", "kv_role": "kv_producer"}'
    words = ("vllm", "serve", "Qwen/Qwen3-8B", "--kv-transfer-config", layerwise)
    assert "LayerwisePushConnector" in run(command, "migrate", "--", *words, cwd=tmp_path, status=1)
    run(command, "secret", tmp_path / "secret", cwd=tmp_path)
    assert "no trace" in run(command, "timeline", tmp_path, cwd=tmp_path, status=1)
    assert "--prefill" in run(clean / "python", "-m", "vllm_ascend_pd", "proxy", "--help", cwd=tmp_path)
    run(clean / "python", "-c", "import vllm_ascend_pd.proxy.server", cwd=tmp_path)
