# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests through two prefill engines and one decode engine: what is asked (`workload`), the right
answers (`answers`), asking (`load`), what became of it (`ledger`), what the processes hold meanwhile (`samples`), and
all of it in order (`run`)."""
