# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, each in a file named for the versions that it is for."""
