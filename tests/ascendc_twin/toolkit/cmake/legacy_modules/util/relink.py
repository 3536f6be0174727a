# SPDX-License-Identifier: Apache-2.0
"""relink.py BUILD TARGET: runs the link command of a target again, cut at blanks and without a shell."""

import subprocess
import sys

import link_file

build, target = sys.argv[1:]
for line in link_file.read(build, target):
    subprocess.run(line.split(), cwd=build, check=True)
