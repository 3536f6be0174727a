# SPDX-License-Identifier: Apache-2.0
"""What asking prefill by decode's token ids costs, against asking it by the client's chat.

$ python benchmarks/token_ids.py [--tokens 1024 32768 131072] [--rounds 9] [--check] [--json]

Both ways are the code that proxy and engines run for a prompt, on one thread and without a network:

text   the proxy makes prefill's body of the client's; prefill decodes and validates it (vLLM's ChatCompletionRequest),
       renders the chat template and tokenizes the text
ids    decode encodes the ids into the ticket; the proxy reads them out and makes prefill's body; prefill decodes and
       validates it (vLLM's CompletionRequest)

and `digest` is what a scheduler takes for the digest of the prompt, which both ways have. `sent` is what proxy and
engines send each other of the prompt, without decode's own copy of the client's body. The tokenizer is a byte-level BPE
of 32,000 tokens, trained here on the sources of Python's standard library; prompts are other parts of those sources.

With --check, exits with 1 where ids take more than MAX_RATIO of the time that text takes.
"""

import argparse
import json
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).resolve().parent))

from helpers.report import line

from vllm_ascend_pd.core.prompt_digest import PromptDigest, digest_of_tokens
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.proxy.http.bodies import parse_client_request, prefill_body, tokens_body
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.rendezvous.prefill_requests import read_ticket

MAX_RATIO = 0.5
VOCABULARY = 32_000
TRAINING_BYTES = 8_000_000
BLOCK = 128
TICKET_ID = "0123456789abcdef" * 2
REQUEST_ID = "5b1e0c2e-4d3f-4f0f-8f5a-7c9d1e2f3a4b"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Result:
    """Milliseconds of a prompt, medians of rounds, but for the bytes."""

    tokens: int
    text_proxy_ms: float
    text_prefill_ms: float
    ids_decode_ms: float
    ids_proxy_ms: float
    ids_prefill_ms: float
    digest_ms: float
    text_bytes: int
    ids_bytes: int

    @property
    def text_ms(self) -> float:
        return self.text_proxy_ms + self.text_prefill_ms

    @property
    def ids_ms(self) -> float:
        return self.ids_decode_ms + self.ids_proxy_ms + self.ids_prefill_ms

    @property
    def of_text(self) -> float:
        return self.ids_ms / self.text_ms

    def row(self) -> str:
        return (
            f"{self.tokens:>8}{self.text_proxy_ms:>9.2f}{self.text_prefill_ms:>9.2f}{self.ids_decode_ms:>10.2f}"
            f"{self.ids_proxy_ms:>8.2f}{self.ids_prefill_ms:>9.2f}{self.of_text:>9.2f}{self.digest_ms:>9.2f}"
            f"{self.text_bytes / 1024:>10.0f}{self.ids_bytes / 1024:>9.0f}"
        )


HEADER = (
    f"{'':8}{'text (ms)':>18}{'ids (ms)':>27}{'':9}{'':9}{'sent (KiB)':>19}\n"
    f"{'tokens':>8}{'proxy':>9}{'prefill':>9}{'decode':>10}{'proxy':>8}{'prefill':>9}{'of text':>9}{'digest':>9}"
    f"{'text':>10}{'ids':>9}"
)


def sources() -> Iterator[str]:
    """Files of the standard library, in an order that is the same each time."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    random.Random(0).shuffle(files)
    for file in files:
        yield file.read_text(errors="replace")


def train(texts: Iterator[str]) -> Any:
    """A tokenizer, as transformers has it, of the first `TRAINING_BYTES` of `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus, size = [], 0
    while size < TRAINING_BYTES and (text := next(texts, "")):
        corpus.append(text)
        size += len(text)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def chat_of(tokenizer: Any, texts: list[str], tokens: int) -> list[dict[str, str]]:
    """Messages that become about `tokens` tokens."""
    text = "".join(texts)
    text *= 1 + 8 * tokens // len(text)
    encoded = tokenizer(text[: 8 * tokens], add_special_tokens=False)["input_ids"][:tokens]
    return [{"role": "user", "content": tokenizer.decode(encoded)}]


def median_ms(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Of each run; they take turns, so that a change in the machine's load hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - begun))
    return {name: statistics.median(each) for name, each in times.items()}


def measure(tokenizer: Any, texts: list[str], tokens: int, rounds: int) -> Result:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    messages = chat_of(tokenizer, texts, tokens)
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "stream": True}).encode()
    request = parse_client_request(Endpoint.CHAT, body)

    def tokenize(messages: Any) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    ids = tokenize(messages)
    ticket = Ticket(
        request_id=f"chatcmpl-{REQUEST_ID}", remote_block_ids=[list(range(len(ids) // BLOCK + 1))],
        remote_block_size=[BLOCK], remote_engine_id="decode", remote_host="10.0.0.1", remote_port=20001,
        remote_tp_size=8, remote_cached_tokens=0, ticket_id=TICKET_ID, num_tokens=len(ids),
        prompt=PromptDigest(tokens=digest_of_tokens(TICKET_ID, ids)),
    )  # fmt: skip
    plain = msgspec.json.encode(ticket)
    posted = decode_posts(ticket, ids)
    taken = read_ticket(posted)
    assert taken.token_ids is not None
    by_text = prefill_body(request, 0, plain, REQUEST_ID)
    by_ids = tokens_body(request, taken.token_ids, taken.encoded)

    def proxy_by_ids() -> bytes:
        taken = read_ticket(posted)
        assert taken.token_ids is not None
        return tokens_body(request, taken.token_ids, taken.encoded)

    took = median_ms(
        {
            "text_proxy": lambda: (read_ticket(plain), prefill_body(request, 0, plain, REQUEST_ID)),
            "text_prefill": lambda: tokenize(ChatCompletionRequest.model_validate(json.loads(by_text)).messages),
            "ids_decode": lambda: decode_posts(ticket, ids),
            "ids_proxy": proxy_by_ids,
            "ids_prefill": lambda: CompletionRequest.model_validate(json.loads(by_ids)),
            "digest": lambda: digest_of_tokens(TICKET_ID, ids[: len(ids)]),
        },
        rounds,
    )
    asked = CompletionRequest.model_validate(json.loads(by_ids)).prompt
    assert asked == ids, "prefill would get another prompt"
    return Result(
        len(ids),
        **{f"{name}_ms": value for name, value in took.items()},
        text_bytes=len(plain) + len(by_text),
        ids_bytes=len(posted) + len(by_ids),
    )


def decode_posts(ticket: Ticket, token_ids: list[int]) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(ticket), "token_ids": token_ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32_768, 131_072])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if min(*args.tokens, args.rounds) <= 0:
        parser.error("--tokens and --rounds must be positive")

    texts = sources()
    tokenizer = train(texts)
    others = list(islice(texts, 200))
    if not args.json:
        print(HEADER)
    missed = False
    for tokens in args.tokens:
        result = measure(tokenizer, others, tokens, args.rounds)
        holds = result.of_text <= MAX_RATIO
        missed |= not holds
        print(line(result, holds, args.json, of_text=result.of_text), flush=True)
    if args.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
