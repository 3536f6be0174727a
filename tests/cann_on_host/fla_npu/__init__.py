# SPDX-License-Identifier: Apache-2.0
"""In the place of CANN's kernels for linear attention, which vllm-ascend 0.30 imports for every model."""
