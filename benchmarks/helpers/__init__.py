# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmarks: the sides that are compared, floors, stand-ins and printing."""
