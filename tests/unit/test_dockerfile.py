# SPDX-License-Identifier: Apache-2.0
"""The image's Dockerfile, as far as it can be tried without CANN's images: its requirements fit together, and the
package can be built from what it copies."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "examples/docker/Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Instructions with their arguments, in their order."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, text.strip()) for name, _, text in (line.partition(" ") for line in joined.splitlines() if line)]


def arguments(wanted: str) -> list[str]:
    return [text for name, text in instructions() if name == wanted]


def requirements(*options: str) -> list[Requirement]:
    """Those of `pip install`'s arguments, and of the files that these name."""
    found = []
    words = iter(options)
    for word in words:
        if pinned := re.fullmatch(r"\$\(grep '\^([\w-]+)==' (\S+)\)", word):
            found += [each for each in requirements("-r", pinned[2]) if each.name == pinned[1]]
        elif word == "-r":
            lines = (REPOSITORY / next(words)).read_text().splitlines()
            found += [Requirement(line) for line in lines if line and not line.startswith("#")]
        elif word == "-e":
            extra = re.fullmatch(r"\.\[(\w+)\]", next(words))
            assert extra is not None
            project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
            found += map(Requirement, [*project["dependencies"], *project["optional-dependencies"][extra[1]]])
        elif not word.startswith("--no-"):
            found.append(Requirement(word))
    return found


def test_the_base_has_the_vllm_that_the_requirements_name() -> None:
    [base] = [text.removeprefix("BASE=") for text in arguments("ARG") if text.startswith("BASE=")]
    image, _, tag = base.partition(":")
    assert image == "quay.io/ascend/vllm-ascend"
    [vllm] = [each for each in requirements("-r", "requirements/npu.txt") if each.name == "vllm"]
    assert vllm.specifier.contains(Version(tag.removeprefix("v")))


def installed() -> list[Requirement]:
    """What the image installs."""
    lines = [re.search(r"pip install (.*?)(;|$)", text) for text in arguments("RUN")]
    assert all(lines)
    return [each for line in lines if line for each in requirements(*shlex.split(line[1]))]


def test_the_image_adds_only_mooncake_and_this_package() -> None:
    """vllm-ascend 0.23.0.post1 would be compiled, and needs a package that PyPI does not have."""
    own = {each.name for each in requirements("-e", ".[npu]")}
    assert {each.name for each in installed()} == {"mooncake-transfer-engine-npu", "setuptools"} | own


def tool(name: str) -> str:
    """Returns the path of a program that the package's extra `dev` installs."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, f"pip install -e '.[dev]' installs {name}"
    return found


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([tool("hadolint"), str(FILE)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def resolved(platform: str, python: str, overrides: Path) -> subprocess.CompletedProcess[str]:
    """Resolves requirements/npu.txt without installing anything. Skips the test where no index answers."""
    command = [tool("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    command += ["--override", str(overrides), "--python-platform", f"{platform}-manylinux_2_35"]
    command += ["--python-version", python, "requirements/npu.txt"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    if "error sending request" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip(f"no package index: {done.stderr[-200:]}")
    return done


OVERRIDES = REPOSITORY / "requirements/npu-overrides.txt"


@pytest.mark.parametrize(
    ("platform", "python"),
    [
        ("aarch64", "3.11"),
        ("x86_64", "3.12"),
        pytest.param("aarch64", "3.12", marks=pytest.mark.long),
        pytest.param("x86_64", "3.11", marks=pytest.mark.long),
    ],
)
def test_the_requirements_can_be_resolved(platform: str, python: str) -> None:
    done = resolved(platform, python, OVERRIDES)
    assert done.returncode == 0, done.stderr
    found = {each.name: str(each.specifier) for each in map(Requirement, done.stdout.splitlines())}
    pinned = {each.name: str(each.specifier) for each in requirements("-r", "requirements/npu.txt")}
    assert {name: found[name] for name in pinned if name != "vllm-ascend"} == {
        name: version for name, version in pinned.items() if name != "vllm-ascend"
    }


def test_the_file_names_what_needs_the_further_index(tmp_path: Path) -> None:
    here_only = tmp_path / "overrides.txt"
    here_only.write_text("".join(line for line in OVERRIDES.open() if not line.startswith("triton-ascend")))
    done = resolved("x86_64", "3.11", here_only)
    assert done.returncode != 0, "PyPI has it now: drop the override, and the further index from requirements/npu.txt"
    [lacks] = set(re.findall(r"no version of (\S+)==(\S+)", done.stderr))
    text = (REPOSITORY / "requirements/npu.txt").read_text()
    assert " ".join(lacks) in text
    assert "--extra-index-url" in text


def test_requirements_do_not_contradict_each_other() -> None:
    found = installed()
    pinned = {each.name: next(iter(each.specifier)).version for each in requirements("-r", "requirements/npu.txt")}
    assert {"torch", "torch-npu", "vllm", "vllm-ascend", "mooncake-transfer-engine-npu"} <= pinned.keys()
    assert [each for each in found if each.name in pinned and not each.specifier.contains(pinned[each.name])] == []
    [setuptools] = [each.specifier for each in found if each.name == "setuptools"]
    needed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    assert str(setuptools).endswith(str(Requirement(needed[0]).specifier))


def copied(target: Path) -> None:
    """Does what the COPY instructions do."""
    ignored = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for text in arguments("COPY"):
        *sources, place = text.split()
        for source in sources:
            assert f"!{source}" in ignored or f"!{source.partition('/')[0]}" in ignored, source
            to = target / source if place == "./" else target / place
            to.parent.mkdir(parents=True, exist_ok=True)
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, to, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(REPOSITORY / source, to)


def test_the_package_can_be_built_from_what_is_copied(tmp_path: Path) -> None:
    copied(tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install vllm-ascend-pd" in done.stdout
    # Every file of the package and of its kernels is there.
    for folder in ("vllm_ascend_pd", "csrc"):
        files = {path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*") if path.is_file()}
        lost = {path for path in files if path.suffix not in (".so", ".pyc") and not (tmp_path / path).exists()}
        assert lost == set()


def test_pods_find_the_scripts_in_the_image() -> None:
    [folder] = arguments("WORKDIR")
    for role in ("prefill", "decode"):
        resource = yaml.safe_load((REPOSITORY / f"examples/kubernetes/{role}.yaml").read_text())
        template = resource["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        script = Path(template["spec"]["containers"][0]["command"][0])
        assert (REPOSITORY / script.relative_to(folder)).is_file()
        assert script.relative_to(folder).parts[0] in " ".join(arguments("COPY")).split()
