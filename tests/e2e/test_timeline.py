# SPDX-License-Identifier: Apache-2.0
"""The traces and metrics of real engines: compute and push overlap, and what the command makes of the traces."""

import os
import subprocess

import pytest

from harness.client import Client, random_prompt
from harness.clusters import TRACED, Cluster
from harness.documented import documented, is_part_of
from harness.engines import script
from harness.metrics import requests_are_seen_everywhere
from harness.models import TINY
from harness.timelines import is_chrome_trace, nests_properly, prefill_ranks, traced_requests

pytestmark = [
    pytest.mark.parametrize("cluster", [TRACED], ids=str, indirect=True),  # one of test_one_to_one's
    pytest.mark.timeout(600),  # the first test of a cluster starts it
]

LAYERS = {f"model.layers.{n}.self_attn.attn" for n in range(TINY.layers)}


def served(cluster: Cluster, client: Client, tokens: int, seed: str) -> tuple[str, int]:
    """(the request's id on the engines, the bytes decode has received)."""
    body = {"model": str(cluster.model), "prompt": random_prompt(tokens, seed), "max_tokens": 2, "temperature": 0}
    answer = client.http.post("/v1/completions", json=body).raise_for_status().json()
    return f"{answer['id']}-0", answer["kv_transfer_params"]["received_bytes"]


def test_layers_are_on_their_way_while_others_are_computed(cluster: Cluster, client: Client) -> None:
    """1,000 tokens are two steps of prefill: tens of milliseconds, for which a busy machine may let decode's grant
    wait. So one request of five has to show the overlap; all else holds for each."""
    folder = cluster.prefill[0].traces
    for i in range(5):
        name, num_bytes = served(cluster, client, 1000, f"timeline {i}")
        recordings, requests = traced_requests(
            folder,
            lambda all, name=name, sent=num_bytes: any(name in r.names and r.ready and r.bytes == sent for r in all),
        )
        [one] = [request for request in requests if name in request.names]
        assert one.failures == set()
        assert one.bytes == num_bytes
        nests_properly(recordings, one, LAYERS, regroups=True)
        assert len(prefill_ranks(recordings)) == 2
        assert one.issued < one.granted < one.write_end < one.ready
        assert one.issued < one.compute_begin < one.compute_end
        if min(begin for begin, _ in one.written) < one.compute_end:
            return
    pytest.fail("no request's first layer was pushed before its last one was computed")


def test_requests_are_seen_in_all_metrics(cluster: Cluster, client: Client) -> None:
    requests_are_seen_everywhere(cluster, client)


def test_no_trace_has_a_secret_or_a_prompt(cluster: Cluster, client: Client) -> None:
    """Of what a trace says, only the names of requests, engines and layers vary."""
    prompt = "the quick brown fox jumps over a lazy dog, " * 20
    body = {"model": str(cluster.model), "prompt": prompt, "max_tokens": 2}
    answer = client.http.post("/v1/completions", json=body).raise_for_status().json()
    folder = cluster.prefill[0].traces
    name = f"{answer['id']}-0"
    traced_requests(folder, lambda all: any(name in r.names and r.ready for r in all))
    text = "".join(file.read_text() for file in folder.glob("events-*.json"))
    assert name in text
    assert "quick brown" not in text
    assert answer["choices"][0]["text"] not in text or not answer["choices"][0]["text"].strip()


def test_the_command_draws_a_request(cluster: Cluster, client: Client) -> None:
    name, _ = served(cluster, client, 700, "drawn")
    folder = cluster.prefill[0].traces
    traced_requests(folder, lambda all: any(name in r.names and r.ready for r in all))
    words = documented(
        "docs/timeline.md", "vllm-ascend-pd timeline", {"/var/tmp/pd-traces": str(folder), "cmpl-8f4c": name}
    )
    ran = subprocess.run(
        [script(words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert ran.returncode == 0, ran.stderr
    [row] = [line.split() for line in ran.stdout.splitlines() if line.split()[:1] == [name]]
    assert row[1] == "700"
    assert row[2:4] == ["-", "-"]  # decode asked first
    assert "-" not in row[4:]
    assert '"cat":"placed"' in (folder / "trace.json").read_text()
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert any(
        event["args"].get("request") == name for event in is_chrome_trace(folder / "trace.json", 0.0, ended=False)
    )


def test_the_engines_are_those_of_the_readme(cluster: Cluster) -> None:
    """What these tests show holds for the commands that the README has."""
    values = {"MODEL": str(cluster.model)}
    [prefill], [decode] = cluster.prefill, cluster.decode
    _, *prefill_words = documented(
        "README.md", "ASCEND_RT_VISIBLE_DEVICES=0,1 vllm serve", {**values, "8100": str(prefill.port)}
    )
    ports = {"8200": str(decode.port), "19000": str(decode.kv_port)}
    _, *decode_words = documented("README.md", "ASCEND_RT_VISIBLE_DEVICES=2 vllm serve", {**values, **ports})
    for words, engine in ((prefill_words, prefill), (decode_words, decode)):
        assert list(engine.process.command[1:3]) == words[1:3]
        assert is_part_of(words, engine.process.command)
