# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4, and drafts, on vLLM's CPU backend without Triton.

DeepSeek V4 runs for contexts of at most `4 * index_topk` tokens. The model, its kernels and its caches on the CPU are
C++ of vLLM's wheel. Only the metadata of a step is made by Triton kernels, and Triton for CPUs is not on PyPI. These do
the same in torch. What the CPU's attention never reads is left out: indices of windows, and the index's metadata, which
only longer contexts need.
"""

from collections import defaultdict
from typing import Any

import torch


def replace_kernels() -> None:
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    metadata.compute_token_to_req_indices = _requests_of_tokens
    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = _map_compressed_slots
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = _nothing
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL = _nothing
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL = _nothing
    indexer._PREPARE_UNIFORM_DECODE_KERNEL = _nothing
    # vLLM 0.32.0's returns three of the five plans that are read, all None: no step with this model works without.
    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = lambda self, tokens: defaultdict(lambda: None)


def replace_kernels_of_drafts() -> None:
    """Makes vLLM 0.30.0's CPU runner use its own kernels. It replaces functions that nobody calls any more, so an
    engine ends with its first draft."""
    from vllm.utils import cpu_triton_utils as on_cpu
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import utils

    of_next_draft = on_cpu.eagle_step_slot_mapping_metadata_kernel.func

    def next_draft(  # vLLM looks for arguments by these names
        positions: Any,
        block_table: Any,
        block_table_stride: Any,
        seq_lens: Any,
        out_clamped_positions: Any,
        out_slot_mapping: Any,
        block_size: Any,
        max_model_len: Any,
        n_blocks_per_req: Any,
        PAD_ID: Any,
    ) -> None:
        outputs = out_clamped_positions, out_slot_mapping
        sizes = block_size, max_model_len, n_blocks_per_req, PAD_ID
        of_next_draft(positions, block_table, block_table_stride, seq_lens, *outputs, *sizes)

    utils._eagle_step_slot_mapping_metadata.kernel = on_cpu._FuncWrapper(next_draft)
    rejection_sampler._rejection_greedy_sample.kernel = on_cpu.rejection_greedy_sample_kernel
    rejection_sampler._rejection_random_sample.kernel = on_cpu.rejection_random_sample_kernel
    rejection_sampler._expand.kernel = on_cpu.expand_kernel
    rejection_sampler._sample_recovered_tokens.kernel = on_cpu.sample_recovered_tokens_kernel


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Fills nothing that is read here."""


def _requests_of_tokens(starts: torch.Tensor, out: torch.Tensor, num_mapped: int, num_tokens: int) -> torch.Tensor:
    """As `vllm.v1.attention.ops.metadata.compute_token_to_req_indices`."""
    out[:num_tokens] = 0
    tokens = torch.arange(min(num_mapped, num_tokens), dtype=starts.dtype)
    found = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    out[: len(tokens)] = found.clamp(max=len(starts) - 2)
    return out[:num_tokens]


def _map_compressed_slots(
    out: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    ratio: int,
    dcp: int,
    interleave: int,
) -> None:
    """As `CompressedSlotMappingKernel`: the last token of an entry has the entry's slot, the others have -1."""
    assert dcp == 1
    for i in range(block_table.shape[0]):
        start, stop = int(starts[i]), int(starts[i + 1])
        length = stop - start
        tokens = torch.arange(int(seq_lens[i]) - length, int(seq_lens[i]))
        entries = tokens // ratio
        valid = ((tokens + 1) % ratio == 0) & (slots[start:stop] != -1)
        blocks = block_table[i, torch.where(valid, entries // block_size, 0)].long()
        out[start:stop] = torch.where(valid, blocks * block_size + entries % block_size, -1)
