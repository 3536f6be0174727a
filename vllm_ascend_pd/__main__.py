# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_ascend_pd`: the `vllm-ascend-pd` command."""

from vllm_ascend_pd.cli import main

main()
