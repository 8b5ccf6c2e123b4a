"""Two clients of one server whose n-grams they share: neither reads the other's text, however it asks.

The oracle is the same call under a salt that nobody has used, which finds an empty trie: what the shared trie makes a
server say beyond that must be the caller's own. Counts, times and the sizes of pieces may differ (docs/serving.md).
"""

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from slipstream.serve.engine.process import build_engine
from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, RESPONSES, client_of, events, serving

VICTIM = "sk-victim"
ATTACKER = "sk-attacker"
# What differs with speed, and names, which no text of a client reaches.
FIGURES = (
    "metrics",
    "usage",
    "source",
    "position",
    "round",
    "drafted",
    "rows",
    "created",
    "created_at",
    "completed_at",
)
NAMES = ("item_id", "call_id")
TEXTS = ("text", "content", "delta")
SALTS = (f"salt {number}" for number in count())

Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(shallow, tmp_path_factory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{VICTIM}\n{ATTACKER}\n")
    config = ServeConfig(
        target=str(shallow),
        draft="ngram",
        drafter={"share_between_keys": True},
        width=8,  # whatever passes cost on this machine
        port=0,
        max_running=4,
        kv_cache_tokens=4096,
        api_key_file=str(keys),
    )
    with serving(config, build_engine) as running:
        yield running


@pytest.fixture
def clients(server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """The victim's and the attacker's."""
    headers = [{"Authorization": f"Bearer {key}"} for key in (VICTIM, ATTACKER)]
    with client_of(server, headers=headers[0]) as victim, client_of(server, headers=headers[1]) as attacker:
        yield victim, attacker


@pytest.fixture(scope="module")
def tokenizer(shallow) -> Any:
    return AutoTokenizer.from_pretrained(shallow)


def secret_of(rng: random.Random) -> str:
    words = ("account", "code", "door", "lamp", "river", "stone")
    numbers = "-".join(str(rng.randrange(1000, 10_000)) for _ in range(3))
    return f"The {rng.choice(words)} of {rng.choice(words)} is {numbers} and the PIN is {rng.randrange(1000, 10_000)}."


def forced(prefix: list[int], **fields: Any) -> Body:
    """A completion whose first token is the last known one, so that its second place shows what followed that."""
    common = {"max_tokens": 3, "temperature": 0, "seed": 7, "ignore_eos": True, "speculation": {"trace": True}}
    return {"prompt": prefix[:-1], "logit_bias": {str(prefix[-1]): 100}, **common, **fields}


def asked_in_chat(prefix: list[int], text: str) -> Body:
    """The body that the playground sends, and a bias, as its settings may have one."""
    body = forced(prefix, stream=True, logprobs=True, top_logprobs=5)
    del body["prompt"]
    return {**body, "messages": [{"role": "user", "content": text}]}


WAYS: dict[str, tuple[str, Callable[[list[int], str], Body]]] = {
    "trace": (COMPLETIONS, lambda prefix, _: forced(prefix)),
    "log-probabilities": (COMPLETIONS, lambda prefix, _: forced(prefix, logprobs=5, prompt_logprobs=2)),
    "echo": (COMPLETIONS, lambda prefix, _: forced(prefix, echo=True, logprobs=1)),
    "choices": (COMPLETIONS, lambda prefix, _: forced(prefix, n=2, stream=True, logprobs=5)),
    "playground": (CHAT, asked_in_chat),
    "responses": (RESPONSES, lambda _, text: {"input": text, "max_output_tokens": 4, "temperature": 0, "seed": 7}),
}


def answers(client: httpx.Client, path: str, body: Body) -> list[Any]:
    """The events of a stream, or the answer."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return list(events(response)) if body.get("stream") else [response.json()]


def told(responses: list[Any]) -> tuple[set[Any], int]:
    """Every text and number that answers hold, but for FIGURES, and how many tokens they withhold. Texts that come in
    pieces are joined."""
    values = set()
    texts = []
    num_withheld = 0

    def read(value, name=""):
        nonlocal num_withheld
        if isinstance(value, dict):
            num_withheld += "id" in value and value["id"] is None
            for key, entry in value.items():
                if key not in FIGURES and key not in NAMES and not (key == "id" and isinstance(entry, str)):
                    values.update([key] if name == "top_logprobs" else [])
                    read(entry, key)
        elif isinstance(value, list):
            for entry in value:
                read(entry, name)
        elif name in TEXTS and isinstance(value, str):
            texts.append(value)
        elif not isinstance(value, float):
            values.add(value)

    read(responses)
    return {*values, "".join(texts)} - {None}, num_withheld


@pytest.mark.parametrize("way", WAYS)
def test_no_answer_shows_another_clients_text(way, clients, tokenizer):
    """Not even to one who knows the beginning and asks what comes next, at every place."""
    victim, attacker = clients
    rng = random.Random(way)
    path, body_of = WAYS[way]
    num_withheld = 0
    for _ in range(2):
        secret = secret_of(rng)
        tokens = tokenizer(secret, add_special_tokens=False).input_ids
        message = {"messages": [{"role": "user", "content": secret}], "max_tokens": 4, "temperature": 0}
        answers(victim, CHAT, message)
        for end in sorted(rng.sample(range(4, len(tokens)), 4)):
            prefix = tokens[:end]
            body = body_of(prefix, tokenizer.decode(prefix))
            shared, withheld = told(answers(attacker, path, body))
            alone, _ = told(answers(attacker, path, {**body, "cache_salt": next(SALTS)}))
            names = set(map(tokenizer.decode, prefix))
            assert shared <= alone | names | set(prefix), tokenizer.decode(prefix)
            num_withheld += withheld
    assert (num_withheld > 0) == (path != RESPONSES), "or the attack has no aim"


def test_a_secret_is_not_read_token_by_token(clients, tokenizer):
    victim, attacker = clients
    secret = secret_of(random.Random(5))
    answers(victim, CHAT, {"messages": [{"role": "user", "content": secret}], "max_tokens": 4, "temperature": 0})
    prefix = tokenizer(secret, add_special_tokens=False).input_ids[:5]
    start = len(prefix)
    for _ in range(20):
        (answer,) = answers(attacker, COMPLETIONS, forced(prefix, max_tokens=2))
        guesses = [guess["id"] for guess in answer["choices"][0]["speculation"]["trace"][1]["refused"]]
        assert guesses, "the trie proposes something"
        prefix += [guess for guess in guesses if guess is not None][:1]
    assert len(prefix) == start, tokenizer.decode(prefix)


def test_salts_and_streams_are_told_apart_by_the_oracle():
    """The oracle itself: it sees tokens, names and texts, joined, and no figures."""
    trace = {"id": 5, "token": "a", "rows": 9, "refused": [{"id": None, "token": None}, {"id": 6, "token": "b"}]}
    pieces = [{"id": "cmpl-1", "choices": [{"text": text, "speculation": {"trace": [trace]}}]} for text in ("x", "y")]
    assert told(json.loads(json.dumps(pieces))) == ({5, 6, "a", "b", "xy"}, 2)
