# SPDX-License-Identifier: Apache-2.0
"""Every file of ours that can hold a comment names its licence at its top."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (".github", "benchmarks", "csrc", "examples", "requirements", "scripts", "tests", "vllm_ascend_pd")
COMMENTED = {".py", ".sh", ".txt", ".toml", ".yml", ".yaml", ".h", ".cpp"}


def test_files_name_their_licence() -> None:
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.suffix in COMMENTED]
    files += [path for path in REPOSITORY.glob("*") if path.suffix in COMMENTED]
    assert len(files) > 300
    tops = {path: path.read_text().splitlines()[:2] for path in files}
    line = "SPDX-License-Identifier: Apache-2.0"
    assert [path for path, top in tops.items() if not any(line in each for each in top)] == []
