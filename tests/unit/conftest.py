# SPDX-License-Identifier: Apache-2.0
"""Hypothesis draws the same examples in every run: a failure is the change's, not the day's."""

from hypothesis import settings

settings.register_profile("same every run", derandomize=True)
settings.load_profile("same every run")
