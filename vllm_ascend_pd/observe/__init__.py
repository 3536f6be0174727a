# SPDX-License-Identifier: Apache-2.0
"""What engines record about themselves while they run: figures for metrics, and trace events in files."""
