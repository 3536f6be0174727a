# SPDX-License-Identifier: Apache-2.0
"""Versions of the Ascend driver and firmware, as their packages write them into `version.info`."""

from pathlib import Path

from vllm_ascend_pd.tools.doctor import driver
from vllm_ascend_pd.tools.doctor.driver import Driver
from vllm_ascend_pd.tools.doctor.finding import Level

DRIVER_INFO = """\
Version=25.0.rc1.1
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C21SPC002B220
compatible_version_fw=[7.0.0,7.7.99]
package_version=25.0.rc1.1
"""
FIRMWARE_INFO = """\
Version=7.7.0.1.231
firmware_version=1.0
package_version=25.0.rc1.1
"""


def install(root: Path, driver_info: str | None, firmware_info: str | None) -> None:
    for part, text in (("driver", driver_info), ("firmware", firmware_info)):
        if text is not None:
            (root / part).mkdir(parents=True)
            (root / part / "version.info").write_text(text)


def test_versions_come_from_the_default_folder(tmp_path: Path) -> None:
    install(tmp_path, DRIVER_INFO, FIRMWARE_INFO)
    found = driver.installed(tmp_path / "no-such-file", tmp_path)
    assert found == Driver(tmp_path, "25.0.rc1.1", "7.7.0.1.231")
    [finding] = driver.judge(found)
    assert (finding.check, finding.level) == ("npu.driver", Level.OK)
    assert finding.figures == {"driver": "25.0.rc1.1", "firmware": "7.7.0.1.231"}


def test_ascend_install_info_names_another_folder(tmp_path: Path) -> None:
    install(tmp_path / "opt", DRIVER_INFO, None)
    info = tmp_path / "ascend_install.info"
    info.write_text(f"UserName=HwHiAiUser\nDriver_Install_Path_Param={tmp_path / 'opt'}\n")
    assert driver.installed(info, tmp_path) == Driver(tmp_path / "opt", "25.0.rc1.1", None)


def test_a_container_without_the_file_is_told_to_mount_it(tmp_path: Path) -> None:
    [finding] = driver.judge(driver.installed(tmp_path / "none", tmp_path))
    assert finding.level is Level.NOTE
    assert f"mount the host's {tmp_path}/driver/version.info" in finding.action


def test_release_candidates_come_before_their_release() -> None:
    versions = ["23.0.7", "24.1.rc3", "24.1.0", "25.0.rc1", "25.0.rc1.1", "25.0.0", "25.2.0", "25.5.0"]
    assert sorted(set(versions), key=driver.version_key) == versions
