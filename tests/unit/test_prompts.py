# SPDX-License-Identifier: Apache-2.0
"""The same prompt on both sides: what schedulers say of vLLM's own requests, and when prefill refuses."""

import inspect
import json
import logging
import time
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request, RequestStatus

from harness.decode_scheduler import SilentMetaserver
from harness.engines import Role
from harness.real_scheduler import *  # noqa: F403
from harness.real_scheduler import RealScheduler
from harness.schedulers import decode_scheduler, prefill_scheduler
from harness.scheduling import Scheduled, make_output
from vllm_ascend_pd.connector import weights
from vllm_ascend_pd.connector.model import media_hashing as hashing_of
from vllm_ascend_pd.connector.vllm_requests import VllmRequests
from vllm_ascend_pd.core.caches import StateGroup, TokenGroup
from vllm_ascend_pd.core.prompt_digest import (
    PromptDigest,
    differences,
    digest_of_names,
    digest_of_tokens,
)
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.tickets import EngineInfo

BLOCK = 16
URL = "http://127.0.0.1:1/v1/metaserver"
TOKENS = list(range(100, 140))
BLOCKS = ([1, 2, 3],)
HASHING = "0.32.0 blake3 /models/vision"


def image(name, offset=2, **fields):
    position = PlaceholderRange(offset=offset, length=4)
    return MultiModalFeatureSpec(None, "image", identifier=name, mm_position=position, **{"mm_hash": name, **fields})


def request(params, tokens=TOKENS, **fields):
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(request_id="r", prompt_token_ids=tokens, sampling_params=sampling, pooling_params=None, **fields)


def posted_by_decode(groups=None, media_hashing=HASHING, wants=True, **fields):
    """The ticket of a request on decode, as the metaserver gets it."""
    metaserver = SilentMetaserver()
    engine = EngineInfo("decode-0", "127.0.0.1", 5555, 1)
    scheduler = decode_scheduler(engine, groups or [TokenGroup(BLOCK)], metaserver, media_hashing=media_hashing)
    params = {"do_remote_prefill": True, "metaserver": URL, **({"wants_token_ids": True} if wants else {})}
    asked = request(params, **fields)
    scheduler.add_request(asked)
    blocks = BLOCKS if groups is None else tuple([1, 2, 3][: 1 if group.holds_state else 3] for group in groups)
    scheduler.allocated(asked, blocks, scheduler.matched_tokens(asked, 0))
    scheduler.build_step({"other": 1})
    [posted] = metaserver.posted
    return json.loads(msgspec.json.encode(posted))


def refusal_of_prefill(posted, groups=None, media_hashing=HASHING, allow_other_media=False, **fields):
    """What prefill says to the request with that ticket; None: it sends its KV."""
    scheduler = prefill_scheduler(
        groups or [TokenGroup(BLOCK)], media_hashing=media_hashing, allow_other_media=allow_other_media
    )
    asked = request({name: value for name, value in posted.items() if name != "token_ids"}, **fields)
    scheduler.add_request(asked)
    blocks = BLOCKS if groups is None else tuple([1, 2, 3][: 1 if group.holds_state else 3] for group in groups)
    scheduler.allocated(asked, blocks)
    step = scheduler.build_step(make_output(new=[Scheduled(asked, blocks, 0, asked.num_prompt_tokens)]))
    _, said = scheduler.end_request(asked)
    assert bool(step.tickets) == (said is None)
    return None if said is None else said["error"]


def test_other_tokens_of_the_same_number_are_refused():
    """As of a chat template with a date, or another one of equal length."""
    for other in ([*TOKENS[:-1], 7], [7, *TOKENS[1:]], TOKENS[::-1]):
        said = refusal_of_prefill(posted_by_decode(), tokens=other)
        assert said.startswith("the prompt's tokens differ: decode and prefill rendered or tokenized it differently")


def test_the_last_token_counts_only_where_it_is_sent():
    """Decode computes it itself where layers keep a state, or see a window."""
    other_end = [*TOKENS[:-1], 7]
    for groups in ([TokenGroup(BLOCK), StateGroup(4096)], [TokenGroup(BLOCK), TokenGroup(BLOCK, windowed=True)]):
        posted = posted_by_decode(groups)
        assert posted["num_tokens"] == len(TOKENS) - 1
        assert posted["token_ids"] == TOKENS, "prefill needs the whole prompt to drop its last token"
        if groups[1].holds_state:
            assert refusal_of_prefill(posted, groups) is None
            assert refusal_of_prefill(posted, groups, tokens=other_end) is None
            assert "tokens differ" in refusal_of_prefill(posted, groups, tokens=[7, *TOKENS[1:]])
        else:
            VllmRequests().check_prompt(request({}, other_end), msgspec.convert(posted, Ticket))


def test_token_ids_are_posted_where_they_are_wanted_and_say_it_all():
    assert posted_by_decode()["token_ids"] == TOKENS
    assert posted_by_decode(wants=False)["token_ids"] == []
    assert posted_by_decode(mm_features=[image("a")])["token_ids"] == []
    embeddings = torch.zeros(len(TOKENS), 8)
    assert posted_by_decode(tokens=None, prompt_embeds=embeddings)["token_ids"] == []
    assert posted_by_decode(prompt_embeds=embeddings)["token_ids"] == [], "some positions have embeddings"


def test_a_ticket_without_a_digest_is_served_as_older_versions_did():
    posted = posted_by_decode()
    del posted["prompt"]
    assert refusal_of_prefill(posted) is None
    assert refusal_of_prefill(posted, tokens=TOKENS[::-1]) is None


@pytest.mark.parametrize("allowed", [False, True])
def test_other_images_are_refused_whatever_is_allowed(allowed):
    posted = posted_by_decode(mm_features=[image("a"), image("b", 8)])
    assert refusal_of_prefill(posted, mm_features=[image("a"), image("b", 8)]) is None
    for others in ([image("a"), image("c", 8)], [image("b"), image("a", 8)], [image("a")], []):
        said = refusal_of_prefill(posted, allow_other_media=allowed, mm_features=others)
        assert "images, sounds or videos differ" in said


def test_an_adapter_before_an_images_name_does_not_count():
    """`enable_tower_connector_lora` puts it there; the hash beside it has none."""
    posted = posted_by_decode(mm_features=[image("a")])
    named = image("sql:a", mm_hash="a")
    assert refusal_of_prefill(posted, mm_features=[named]) is None


NOT_COMPARED = {
    (HASHING, ""): "prefill does not hash them",
    ("", HASHING): "decode does not hash them",
    ("", ""): "prefill does not hash them",
    (HASHING, "0.32.0 blake3 /mnt/vision"): "the engines hash them differently: use one model path",
}


@pytest.mark.parametrize(("decode", "prefill"), NOT_COMPARED)
def test_images_that_cannot_be_compared_are_refused(decode, prefill, caplog):
    """With neither cache on, vLLM makes up names: they can be equal for other images."""
    caplog.set_level(logging.WARNING)
    names = ("renderer0-mm-1-image-0", "renderer0-mm-7-image-0" if decode and prefill else "renderer0-mm-1-image-0")
    posted = posted_by_decode(media_hashing=decode, mm_features=[image(names[0])])
    fields = {"media_hashing": prefill, "mm_features": [image(names[1])]}
    said = refusal_of_prefill(posted, **fields)
    why = f"images, sounds and videos cannot be compared with decode's: {NOT_COMPARED[decode, prefill]}"
    assert said.startswith(why)
    assert said.endswith(", or set allow_other_model on prefill")
    assert refusal_of_prefill(posted, allow_other_media=True, **fields) is None
    [warned] = [each for each in caplog.messages if each.endswith("allow_other_model is set, so answers may be wrong")]
    assert warned.startswith(why)
    assert "images, sounds or videos differ" in refusal_of_prefill(posted, media_hashing=prefill)
    assert refusal_of_prefill(posted_by_decode(media_hashing=decode), media_hashing=prefill) is None, "no images"


@pytest.mark.parametrize("allowed", [False, True])
def test_the_config_of_prefill_allows_it(allowed, scheduled_model):
    posted = posted_by_decode(mm_features=[image("a")])
    engine = RealScheduler(Role.PREFILL, scheduled_model, extra={"allow_other_model": allowed})
    connector = engine.connector
    asked = request({name: value for name, value in posted.items() if name != "token_ids"}, mm_features=[image("a")])
    connector.get_num_new_matched_tokens(asked, 0)
    connector.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: BLOCKS), 0)
    asked.status = RequestStatus.FINISHED_ABORTED
    _, said = connector.request_finished(asked, [])
    engine.close()
    assert (said is None) == allowed, said


def test_how_images_are_hashed():
    def config(cache_gb=4, prefix_caching=True, model="/models/vision", multimodal=True):
        of_media = SimpleNamespace(mm_processor_cache_gb=cache_gb, mm_hasher_algorithm="blake3")
        model_config = SimpleNamespace(multimodal_config=of_media if multimodal else None, model=model)
        cache_config = SimpleNamespace(enable_prefix_caching=prefix_caching)
        return SimpleNamespace(model_config=model_config, cache_config=cache_config)

    assert hashing_of(config()).endswith(" blake3 /models/vision")
    assert hashing_of(config(cache_gb=0)) == hashing_of(config(prefix_caching=False)) != ""
    assert hashing_of(config(cache_gb=0, prefix_caching=False)) == ""
    assert hashing_of(config(multimodal=False)) == ""
    assert hashing_of(config()) != hashing_of(config(model="/mnt/vision"))


def test_no_tokens_of_embeddings_have_a_digest():
    """Of a prompt of one token with states, whose last token decode computes itself."""
    one = request({}, tokens=None, prompt_embeds=torch.zeros(1, 8))
    assert VllmRequests().digest(one, 0, "0" * 32).embeddings


def test_other_embeddings_are_refused():
    embeddings = torch.randn(len(TOKENS), 256, dtype=torch.bfloat16)
    posted = posted_by_decode(tokens=None, prompt_embeds=embeddings)
    assert refusal_of_prefill(posted, tokens=None, prompt_embeds=embeddings.clone()) is None
    for other in (-embeddings, embeddings.flip(0), embeddings.float()):
        assert refusal_of_prefill(posted, tokens=None, prompt_embeds=other) == "the prompt's embeddings differ"
    assert "embeddings differ" in refusal_of_prefill(posted)


@pytest.mark.skipif(
    "prompt_is_token_ids" not in inspect.signature(Request).parameters, reason="vLLM 0.23 takes no such prompts"
)
def test_all_of_a_prompt_is_cut_that_vllm_s_model_runner_reads():
    """It copies them all into one row of the batch: another length ends the engine."""
    embeddings = torch.randn(len(TOKENS), 256, dtype=torch.bfloat16)
    are_token_ids = [index % 2 == 0 for index in range(len(TOKENS))]
    cut = request({}, tokens=[*TOKENS], prompt_embeds=embeddings, prompt_is_token_ids=are_token_ids)
    VllmRequests().drop_last_prompt_token(cut)
    parts = [cut.prompt_token_ids, cut.prompt_embeds, cut.prompt_is_token_ids, cut.all_token_ids]
    assert [len(part) for part in parts] == [cut.num_prompt_tokens] * 4 == [len(TOKENS) - 1] * 4


def reads_at_once(read):
    """In the place of a thread that reads an adapter."""
    done = Future()
    done.set_result(read())
    return done


def test_another_adapter_under_the_same_name_is_refused(monkeypatch):
    contents = {"/decode/sql": "0a", "/prefill/sql": "0a", "/prefill/other": "0b"}
    monkeypatch.setattr(weights, "read_adapter", lambda lora: contents[lora.lora_path])
    monkeypatch.setattr(weights, "_loaded", weights._Recent())
    monkeypatch.setattr(weights, "_start", reads_at_once)

    def adapter(path):
        return LoRARequest("sql", list(contents).index(path) + 1, path)

    posted = posted_by_decode(lora_request=adapter("/decode/sql"))
    assert refusal_of_prefill(posted, lora_request=adapter("/prefill/sql")) is None
    for other in (adapter("/prefill/other"), None):
        said = refusal_of_prefill(posted, lora_request=other)
        assert said == "the LoRA adapter differs: another one, or one of the same name with other content"
    assert "adapter differs" in refusal_of_prefill(posted_by_decode(), lora_request=adapter("/prefill/sql"))


def test_another_cache_salt_is_refused_and_salts_are_not_in_tickets():
    posted = posted_by_decode(cache_salt="a secret of the client's")
    assert "secret" not in json.dumps(posted)
    assert refusal_of_prefill(posted, cache_salt="a secret of the client's") is None
    for other in ("another", None):
        assert refusal_of_prefill(posted, cache_salt=other) == "the cache salt differs"


def test_all_that_differs_is_said_at_once():
    said = refusal_of_prefill(posted_by_decode(cache_salt="s"), tokens=TOKENS[::-1])
    assert said.index("tokens differ") < said.index("; the cache salt differs")


@pytest.mark.parametrize("tokens", [1 << 17])
def test_the_digest_of_a_long_prompt_does_not_hold_the_scheduler_up(tokens):
    asked = request({}, [17 * n % 150_000 for n in range(tokens)])
    taken = []
    for _ in range(10):
        begun = time.perf_counter()
        VllmRequests().digest(asked, tokens - 1, "0" * 32)
        taken.append(time.perf_counter() - begun)
    assert min(taken) < 0.01
    assert VllmRequests().token_ids(asked) is asked.prompt_token_ids, "nothing is copied"


# --- digests -----------------------------------------------------------------------------------------------------

ID, OTHER_ID = "0123456789abcdef" * 2, "f" * 32
FULL = PromptDigest(
    tokens="0a" * 16, media="1b" * 16, media_hashing="2c" * 16, num_media=2, embeddings="3d" * 16, adapter="4e" * 16,
    salt="5f" * 16,
)  # fmt: skip


@pytest.mark.parametrize("part", ["tokens", "embeddings", "adapter", "salt"])
def test_a_part_that_one_side_does_not_have_differs(part):
    """But prefill may keep a prompt apart that decode does not: some routes of vLLM 0.23 ignore the salt."""
    without = msgspec.structs.replace(FULL, **{part: ""})
    assert len(differences(FULL, without)) == 1
    assert len(differences(without, FULL)) == (0 if part == "salt" else 1)


def test_digests_tell_prompts_and_tickets_apart():
    prompts = ([1, 2, 3], [1, 23], [12, 3], [3, 2, 1], [1, 2], [], [1, 2, 3, 0])
    digests = {digest_of_tokens(ticket, prompt) for prompt in prompts for ticket in (ID, OTHER_ID)}
    assert len(digests) == 2 * len(prompts)
    names = (["a", "b"], ["ab"], ["a", "b", ""], ["b", "a"], [])
    assert len({digest_of_names(ID, each) for each in names}) == len(names)
