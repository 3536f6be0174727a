# SPDX-License-Identifier: Apache-2.0
"""Makes what vLLM's scheduler hands to a connector and gets from ranks, by the classes of each supported version."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from harness.tickets import ticket_with
from vllm_ascend_pd.core.ticket import Ticket

Blocks = tuple[list[int], ...]

BLOCK = 128

FOR_A_PULLING_CONNECTOR: dict[str, dict[str, Any]] = {
    "prefill": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
    "decode": {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "some-other-engine",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    },
}
"""`kv_transfer_params` that proxies of vLLM's and vllm-ascend's pulling connectors send to either side."""


def make_request(
    request_id: str,
    prompt: int | Iterable[int],
    params: object = None,
    fields: Mapping[str, Any] = MappingProxyType({}),
    **wants: Any,
) -> Request:
    """Returns a request that generates one token unless it `wants` more.

    prompt: its tokens, or how many there are.
    params: its `kv_transfer_params`.
    fields: more of the `Request`.
    wants: more of its `SamplingParams`.
    """
    tokens = list(range(prompt) if isinstance(prompt, int) else prompt)
    sampling = {"max_tokens": 1, "ignore_eos": True, "extra_args": {"kv_transfer_params": params}, **wants}
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(**sampling),
        pooling_params=None,
        **fields,
    )


def block_hasher(block: int) -> Callable[[Request], Any]:
    """Returns what names the blocks of a request in the prefix cache. `block`: tokens of each."""
    init_none_hash(sha256)
    return get_request_block_hasher(block, sha256)


def make_ticket(prompt: int, blocks: list[int], tp: int = 1, cached: int = 0) -> Ticket:
    """For `prompt` tokens in `blocks` of a decode engine of `tp` ranks, which has `cached` of them."""
    return ticket_with(
        remote_block_ids=[blocks],
        remote_block_size=[BLOCK],
        remote_engine_id="decode",
        remote_host="10.0.0.1",
        remote_port=20001,
        remote_tp_size=tp,
        remote_cached_tokens=cached,
        num_tokens=prompt,
    )


@dataclass(frozen=True)
class Scheduled:
    """One request's part of a step. `blocks`: all of its blocks when it starts or resumes, else those that came
    anew (None: none did). `computed`: tokens computed before the step."""

    request: Request
    blocks: Blocks | None
    computed: int
    tokens: int


def make_output(
    new: Iterable[Scheduled] = (),
    running: Iterable[Scheduled] = (),
    resumed: Iterable[Scheduled] = (),
    preempted: Iterable[Request] = (),
) -> SchedulerOutput:
    """Returns a step.

    new: requests that start, and with vLLM's v2 model runner those that resume.
    resumed: those that resume with the v1 runner.
    """
    output = SchedulerOutput.make_empty()
    cached = CachedRequestData.make_empty()
    for part in new:
        assert part.blocks is not None
        part.request.num_computed_tokens = part.computed
        output.scheduled_new_reqs.append(NewRequestData.from_request(part.request, _copied(part.blocks)))
    for part in [*running, *resumed]:
        cached.req_ids.append(part.request.request_id)
        cached.new_block_ids.append(_copied(part.blocks))
        cached.num_computed_tokens.append(part.computed)
        cached.num_output_tokens.append(0)
    cached.resumed_req_ids = {part.request.request_id for part in resumed}
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = {part.request.request_id: part.tokens for part in [*new, *running, *resumed]}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.preempted_req_ids = {request.request_id for request in preempted}
    return output


def model_output(step: SchedulerOutput, tokens: list[list[int]], told: KVConnectorOutput | None) -> ModelRunnerOutput:
    """Returns what the model answers to a step: `tokens` of each request. `told`: what ranks tell of KV."""
    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=told,
    )


def aggregated(aggregator: KVOutputAggregator, told: Iterable[KVConnectorOutput]) -> ModelRunnerOutput:
    """Returns what vLLM's core makes of what each rank tells of a step."""
    outputs = [ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=each) for each in told]
    whole = aggregator.aggregate(outputs)
    assert whole is not None
    return whole


def remembered(*objects: object) -> dict[str, Any]:
    """Returns what schedulers, or parts of them, still keep of requests."""
    of_all = (item for each in objects for item in vars(each).items())
    return {name: value for name, value in of_all if isinstance(value, dict | set) and value}


def _copied(blocks: Blocks | None) -> Any:
    return None if blocks is None else tuple(list(ids) for ids in blocks)
