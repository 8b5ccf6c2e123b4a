"""Asks a server the requests of tests/serve/http_cases and compares its answers with what the cases expect.

python tests/serve/check_server.py --url http://127.0.0.1:8000 [--model NAME] [--key KEY] [--extensions] [FILE.yaml ...]

Any server of OpenAI's API can be asked. Cases with the tag `extension` need a field or an endpoint that is not
OpenAI's. Those with the tag `gate`, and what a case expects as `repeats` or `read`, need the gate's server, whose
engine repeats its prompt (test_http_cases.py).

A file has YAML documents. A document's fields are those of its `cases` (see Case), where a case does not say otherwise;
`body` is joined with the case's, and with each of its `bodies`. A request for text is sent whole and streamed, unless
`stream` says one of both, and both answers must be as expected: a stream is joined first. A row of `refused` has a
body, the `param` of its error and words of its message; `unsupported` names fields that no value but null may have.

An expected object may have fewer fields than the answer's. {$has: [...]}: a text or a list with all of these;
{$json: ...}: a JSON text; {$schema: ...}: JSON Schema. In bodies, too: {$repeat: [text, count]}, {$list: [entry,
count]}, {$join: [text, ...]}.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import yaml

from slipstream.tests.serve.joined_streams import CHAT, COMPLETIONS, RESPONSES, join, read_events

FOLDER = Path(__file__).parent / "http_cases"
STREAMED = (CHAT, COMPLETIONS, RESPONSES)
MARKS = ("$has", "$schema", "$json")  # what a value must hold, beside the fields of an object


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what is expected of its answer."""

    name: str
    path: str
    body: Any = None  # sent as JSON
    raw: str | None = None  # sent as it is
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    server: str = "bytes"  # in the gate
    tags: tuple[str, ...] = ()
    status: int = 200
    answer: Any = None
    repeats: Any = None  # the same of the gate's engine
    read: Any = None  # the requests that the gate's server makes of the body
    events: Any = None  # of a stream
    response_headers: Any = None

    def __str__(self) -> str:
        return self.name


def cases_of(file: Path) -> Iterator[Case]:
    """Reads a file: documents with fields that their `cases` and `refused` rows share."""
    for group in yaml.load_all(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        rows = group.pop("cases", [])
        refused = [*group.pop("refused", []), *([{name: ["?"]}, name, "not"] for name in group.pop("unsupported", []))]
        for body, param, *words in refused:
            answer = {"error": {"param": param, "message": {"$has": words}}}
            name = f"{group['path']} refuses {json.dumps(body)[:90]}"
            rows.append({"name": name, "body": body, "status": 400, "repeats": answer})
        for row in rows:
            yield from expand_case(file.stem, group, row)


def expand_case(stem: str, group: dict[str, Any], row: dict[str, Any]) -> Iterator[Case]:
    """Yields a case for each of its `bodies`, whole and, if it has an answer of text, streamed."""
    fields = expand({**group, **row})
    shared = expand(group.get("body", {})) | fields.pop("body", {})
    bodies = fields.pop("bodies", [{}])
    stream = fields.pop("stream", None)
    is_text = fields["path"] in STREAMED and fields.get("status", 200) == 200
    ways = [stream] if stream is not None else [False, True] if is_text else [False]
    has_body = "raw" not in fields and fields.get("method", "POST") == "POST"
    fields["tags"] = tuple(fields.get("tags", ()))
    for (number, body), is_streamed in product(enumerate(bodies, 1), ways):
        name = f"{stem}: {fields['name']}" + f", {number}" * (len(bodies) > 1) + ", streamed" * is_streamed
        content = shared | body
        if is_streamed:
            content = streamed(fields["path"], content)
        yield Case(**{**fields, "name": name, "body": content if has_body else None})


def streamed(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Asks for a stream, with the counts that a whole answer has."""
    options = {} if path == RESPONSES else {"stream_options": {"include_usage": True}}
    return {"stream": True, **options, **body}


def expand(value: Any) -> Any:
    """Writes out {$repeat: [text, count]}, {$list: [entry, count]} and {$join: texts}."""
    if isinstance(value, list):
        return [expand(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "$repeat" in value:
        text, count = value["$repeat"]
        return text * count
    if "$list" in value:
        entry, count = value["$list"]
        return [expand(entry)] * count
    if "$join" in value:
        return "".join(expand(value["$join"]))
    return {name: expand(entry) for name, entry in value.items()}


def differences(expected: Any, actual: Any, place: str = "answer") -> Iterator[str]:
    """Yields a sentence for each place where `actual` is not as expected. Objects may have further fields."""
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, f"{place}.{index}")
    elif not isinstance(expected, dict):
        if expected != actual or isinstance(expected, bool) != isinstance(actual, bool):
            yield f"{place} is {actual!r}, not {expected!r}"
    else:
        yield from (
            f"{place} is {actual!r}, without {word!r}" for word in expected.get("$has", ()) if word not in actual
        )
        if "$schema" in expected:
            faults = jsonschema.Draft202012Validator(expected["$schema"]).iter_errors(actual)
            yield from (f"{place}: {fault.message}" for fault in faults)
        if "$json" in expected:
            yield from differences(expected["$json"], json.loads(actual), place)
        for name in expected.keys() - set(MARKS):
            if not isinstance(actual, dict) or name not in actual:
                yield f"{place} has no field {name}"
            else:
                yield from differences(expected[name], actual[name], f"{place}.{name}")


def form_faults(path: str, answer: dict[str, Any]) -> Iterator[str]:
    """Yields what every answer of an endpoint must have and this one lacks."""
    if "error" in answer and path != RESPONSES:
        yield from differences({"message": {"$schema": {"type": "string", "minLength": 1}}}, answer["error"], "error")
    elif path in (CHAT, COMPLETIONS):
        choices = answer["choices"]
        if [choice["index"] for choice in choices] != [*range(len(choices))]:
            yield "the choices are not in order"
        calls = [call for choice in choices for call in choice.get("message", {}).get("tool_calls") or []]
        if len({call["id"] for call in calls}) < len(calls):
            yield "two calls have one id"
        usage = answer.get("usage")
        if usage and usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
            yield f"usage does not add up: {usage}"
    elif (
        path == RESPONSES
        and "output" in answer
        and len({item["id"] for item in answer["output"]}) < len(answer["output"])
    ):
        yield "two items have one id"


def faults_of(case: Case, client: httpx.Client, model: str | None = None, read: list[Any] | None = None) -> list[str]:
    """Sends the case's request. `model`: named by bodies that name none. `read`: where the gate's server puts the
    requests that it makes of a body; with it, expectations of the gate count."""
    body = {"model": model, **case.body} if model is not None and isinstance(case.body, dict) else case.body
    content = case.raw if case.raw is not None else None if body is None else json.dumps(body)
    headers = ({"Content-Type": "application/json"} if content is not None else {}) | case.headers
    response = client.request(case.method, case.path, content=content, headers=headers)
    if response.status_code != case.status:
        return [f"the status is {response.status_code}, not {case.status}: {response.text[:500]}"]
    faults = [*differences(case.response_headers or {}, dict(response.headers), "headers")]
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = read_events(case.path, response.text)
        faults += differences(case.events or {}, events, "events")
        answer = join(case.path, events, is_whole=body.get("include_reasoning", True))
    else:
        answer = response.json() if response.content else {}
    faults += [*form_faults(case.path, answer), *differences(case.answer or {}, answer)]
    if read is not None:
        faults += [*differences(case.repeats or {}, answer), *differences(case.read or {}, read, "read")]
    return faults


def first_model(client: httpx.Client) -> str:
    try:
        return client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, LookupError, ValueError) as error:
        sys.exit(
            f"--url is {client.base_url}, where /v1/models names no model ({error}); start the server, or use --model"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(FOLDER.glob("*.yaml")))
    parser.add_argument("--url", required=True, help="the server's, without /v1")
    parser.add_argument("--model", help="its name; the first of /v1/models if left out")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--extensions", action="store_true", help="ask what only some servers have, too")
    options = parser.parse_args()
    left_out = {"gate"} if options.extensions else {"gate", "extension"}
    cases = [case for file in options.files for case in cases_of(file) if not left_out & set(case.tags)]
    num_failed = 0
    with httpx.Client(base_url=options.url, timeout=600, headers={"Authorization": f"Bearer {options.key}"}) as client:
        model = options.model or first_model(client)
        for case in cases:
            try:
                faults = faults_of(case, client, model)
            except (AssertionError, LookupError, TypeError, ValueError, httpx.HTTPError) as error:
                faults = [f"the answer cannot be read: {error!r}"]
            num_failed += bool(faults)
            print(f"{'FAILED' if faults else 'passed'} {case}", *faults, sep="\n    ")
    sys.exit(f"{num_failed} of {len(cases)} cases failed" if num_failed else 0)


if __name__ == "__main__":
    main()
