"""The playground in a real browser: what it shows equals what the API says, for eyes, keyboards and screen readers.

Answers are the fake engine's, which repeat the prompt; skipped where there is no Playwright or no Chromium.
"""

import difflib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.serve.engine.process import build_engine
from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import CHAT, MODEL, client_of, gauge, serving, wait_until, write_target
from slipstream.tests.sources import TINY

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.browser

QUESTION = "hello 你"
TOKENS = 24
Open = Callable[..., Any]  # (url, options of a browser's context) -> the page, connected


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        path = CHROMIUM or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as launched:
            yield launched


@pytest.fixture
def open_page(browser) -> Iterator[Open]:
    """Fails where the page logs an error, but for what it does without a key or a server."""
    opened = []
    errors = []

    def make(url, **options):
        opened.append(browser.new_context(**options))
        page = opened[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(url)
        return page

    yield make
    for context in opened:
        context.close()
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []


def ask(page: Any, question: str = QUESTION, tokens: int = TOKENS, *, waits: bool = True):
    page.locator("#max-tokens").evaluate("(field, tokens) => { field.value = tokens; }", tokens)
    page.fill("#message", question)
    page.keyboard.press("Enter")
    if waits:
        page.locator("#status", has_text="Done").wait_for(state="attached")


def answer_of(server: Server, messages: list[dict[str, str]], tokens: int = TOKENS) -> dict[str, Any]:
    """The API's own answer to what the page asks."""
    body = {"messages": messages, "max_tokens": tokens, "logprobs": True, "top_logprobs": 5}
    response = httpx.post(server.url + CHAT, json={**body, "speculation": {"trace": True}}, timeout=120)
    return response.json()


def salted(page: Any, salt: str):
    """Makes the page send a body that the fake engine misbehaves on."""

    def change(route):
        route.continue_(post_data={**route.request.post_data_json, "cache_salt": salt})

    page.route(f"**{CHAT}", change)


def test_tokens_show_where_they_come_from(open_page, server):
    page = open_page(server.url)
    ask(page)
    answer = answer_of(server, [{"role": "user", "content": QUESTION}])
    [choice] = answer["choices"]
    spans = page.locator(".answer .token")
    assert "".join(spans.all_text_contents()) == choice["message"]["content"]
    tints = [
        (span.get_attribute("class").split()[1], span.evaluate("one => one.style.getPropertyValue('--step')"))
        for span in spans.all()
    ]
    trace = choice["speculation"]["trace"]
    # Of a character's bytes the last one shows it; special tokens show nothing.
    visible = [entry for entry in trace if not entry["token"].startswith(("<|", "bytes:\\xe4", "bytes:\\xbd"))]
    kinds = {"target": "target", "fake": "draft"}
    assert tints == [(kinds[entry["source"]], str(entry["position"])) for entry in visible]
    marked = [("refused" in span.get_attribute("class")) for span in spans.all()]
    assert marked == [bool(entry["refused"]) for entry in visible]
    rounds = {entry["round"]: entry["rows"] for entry in trace if entry["round"]}
    length = sum(entry["round"] > 0 for entry in trace) / len(rounds)
    assert page.locator("#charts .value").first.inner_text() == f"{length:.2f}"
    assert page.locator("#charts .value").last.inner_text() == f"{sum(rounds.values()) / len(rounds):.1f}"
    assert page.locator("#charts path.main").first.get_attribute("d").count("L") == len(rounds) - 1
    figures = answer["metrics"]["speculative_decoding"]
    assert f"{figures['num_accepted_draft_tokens']} of " in page.locator(".summary").inner_text()


def test_details_of_a_token(open_page, server):
    """By pointer, and by the slider alone; Escape closes them."""
    page = open_page(server.url)
    ask(page)
    trace, scored = (
        answer_of(server, [{"role": "user", "content": QUESTION}])["choices"][0][name]
        for name in ("speculation", "logprobs")
    )
    place, entry = next(
        (i, entry) for i, entry in enumerate(trace["trace"]) if entry["refused"] and entry["token"].isalpha()
    )
    chance = scored["content"][place]["logprob"]
    refused = page.locator(".answer .token.refused", has_text=entry["token"]).first
    details = page.locator("#details")
    refused.hover()
    text = details.inner_text()
    assert f"{entry['round']}: {entry['drafted']} guessed tokens checked, in a pass of {entry['rows']} rows" in text
    assert f"{100 * math.exp(chance):.0f} %" in text
    assert f"id {entry['id']}" in text
    assert "(withheld)" in text
    assert details.locator("tbody tr").count() == 5
    page.keyboard.press("Escape")
    assert details.is_hidden()
    slider = page.get_by_role("slider", name="Inspect token")
    slider.focus()
    assert details.is_visible()
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext").startswith("1 of ")
    page.keyboard.press("End")
    count = page.locator(".answer .token").count()
    assert slider.get_attribute("aria-valuetext").startswith(f"{count} of {count}, ")
    assert page.locator(".token.picked").inner_text() == page.locator(".answer .token").last.inner_text()
    page.locator("#message").focus()
    assert details.is_hidden()


def test_with_and_without_the_draft(open_page, server):
    page = open_page(server.url)
    bodies = []

    def change(route):
        """The third call gets another question, and so another answer."""
        bodies.append(route.request.post_data_json)
        body = bodies[-1] if len(bodies) % 4 else {**bodies[-1], "messages": [{"role": "user", "content": "help"}]}
        route.continue_(post_data=body)

    page.route(f"**{CHAT}", change)
    page.check("#compare")
    ask(page, "hello")
    assert page.locator(".verdict").inner_text().startswith(f"The same {TOKENS} tokens.")
    page.click("#new-chat")
    ask(page, "hello")
    assert page.locator(".answer").nth(1).locator(".token:not(.target)").count() == 0
    marked = page.locator(".token.differs").count()
    assert marked > 2
    assert "tokens differ" in page.locator(".verdict").inner_text()
    with_draft, without = bodies[:2]
    assert (with_draft["speculation"]["enabled"], without["speculation"]["enabled"]) == (True, False)
    assert {**with_draft, "speculation": 0} == {**without, "speculation": 0}, "the same prompt, seed and settings"


def test_differences_are_the_fewest(open_page, server):
    """Against difflib without its heuristics, which never keeps more than the longest common subsequence."""
    page = open_page(server.url)
    rng = random.Random(0)
    run = "async ([a, b]) => (await import('/playground/tokens.js')).differences(a, b).map((set) => [...set])"
    for _ in range(30):
        a, b = ([rng.randrange(4) for _ in range(rng.randrange(12))] for _ in range(2))
        sides = page.evaluate(run, [[{"id": token} for token in side] for side in (a, b)])
        common = [
            [token for i, token in enumerate(side) if i not in out] for side, out in zip((a, b), sides, strict=True)
        ]
        assert common[0] == common[1]
        blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
        assert len(common[0]) >= sum(block.size for block in blocks)


def test_a_conversation_goes_on_and_can_be_stopped(open_page, server):
    page = open_page(server.url)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    ask(page, "one")
    ask(page, "two", waits=False)
    page.locator(".summary").nth(1).wait_for(state="attached")
    first = page.locator(".answer").first.locator(".token").all_text_contents()
    assert bodies[1]["messages"][:2] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "".join(first)},
    ]
    salted(page, "slow")
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    ask(page, "three", tokens=200, waits=False)
    page.locator(".answer .token").nth(3).wait_for()
    page.locator("#status", has_text="answering").wait_for(state="attached")
    page.get_by_role("button", name="Stop").click()
    page.locator(".summary", has_text="stopped").wait_for()
    with client_of(server) as client:
        wait_until(lambda: gauge(client, "open_requests") == 0, "the engine has ended the answer")


def test_what_comes_at_once_is_laid_out_at_once(open_page, server):
    """A layout takes longer the longer an answer is: one for each of many tokens would hold up the page."""
    page = open_page(server.url)
    count = 2000
    scored = {"bytes": list(b"word "), "logprob": -1, "top_logprobs": []}
    trace = {"source": "target", "position": 0, "round": 1, "refused": [], "drafted": 0, "rows": 1, "id": 5}
    choice = {"delta": {"content": "word "}, "logprobs": {"content": [scored]}, "speculation": {"trace": [trace]}}
    event = f"data: {json.dumps({'choices': [choice]})}\n\n"
    page.route(f"**{CHAT}", lambda route: route.fulfill(body=event * count + "data: [DONE]\n\n"))
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")

    def layouts():
        return next(
            metric["value"]
            for metric in devtools.send("Performance.getMetrics")["metrics"]
            if metric["name"] == "LayoutCount"
        )

    before = layouts()
    ask(page)
    assert layouts() - before < count / 10
    assert page.locator(".answer .token").count() == count


def test_markup_of_a_model_is_text(open_page, server):
    page = open_page(server.url)
    markup = "<img src=x onerror=alert(1)><b>"
    ask(page, markup, tokens=2 * len(markup))
    assert markup in page.locator(".answer .tokens").last.inner_text()
    assert page.locator("#turns img, #turns b").count() == 0


def test_the_text_of_tokens_is_the_text_of_the_answer(open_page, server):
    """Characters of several tokens, tokens without text, a space that the server leaves out, reasoning."""
    page = open_page(server.url)
    run = """async (events) => {
        const { TokenReader } = await import('/playground/tokens.js');
        const reader = new TokenReader();
        return events.flatMap((event) => reader.read(event)).map(({ kind, text }) => [kind, text]);
    }"""

    def event(delta, *spelled):
        scored = [{"bytes": list(spelling), "logprob": -1, "top_logprobs": []} for spelling in spelled]
        trace = [{"source": "target"} for _ in spelled]
        return {"delta": delta, "logprobs": {"content": scored}, "speculation": {"trace": trace}}

    you = "你".encode()
    shown_texts = page.evaluate(
        run,
        [
            event({"reasoning_content": "Hm, so"}, b"<think>", b" Hm", b",", b" so"),
            {"delta": {"reasoning_content": "!"}},
            event({"content": "A"}, b"!", b"</think>", b"\n\n", b"A"),
            event({"content": "你 b"}, you[:1], you[1:], b" ", b"b"),
            event({"content": "?"}, b"unknown"),
            event({}, b"<|end|>"),
        ],
    )
    texts = [["reasoning", text] for text in ("", "Hm", ",", " so", "!")]
    texts += [["content", text] for text in ("", "", "A", "", "你", " ", "b", "?", "")]
    assert shown_texts == texts


def test_a_schema_and_other_settings_are_sent(open_page, server):
    page = open_page(server.url)
    page.locator("summary", has_text="Settings").click()
    page.fill("#schema", "{")
    page.fill("#message", "x")
    page.click("#send")
    assert "This is not JSON" in page.locator("#settings-problem").inner_text()
    assert page.locator("#schema").get_attribute("aria-invalid") == "true"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for name, value in {"schema": json.dumps(schema), "temperature": "0.5", "seed": "7", "system": "Be brief."}.items():
        page.fill(f"#{name}", value)
    with page.expect_request(f"**{CHAT}") as posted:
        ask(page)
    body = posted.value.post_data_json
    assert (body["temperature"], body["seed"], body["response_format"]["json_schema"]["schema"]) == (0.5, 7, schema)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_model_without_a_chat_template(open_page, tmp_path):
    """Its text is continued, with the same marks."""
    target = str(write_target(tmp_path / "target", template=None))
    with serving(ServeConfig(target=target, port=0, served_model_name=MODEL)) as server:
        page = open_page(server.url)
        ask(page, waits=False)
        page.get_by_role("alert").get_by_text("This model is not made for chat.").wait_for()
        page.get_by_label("Continue the text").check()
        page.get_by_role("button", name="Try again").click()
        page.locator("#status", has_text="Done").wait_for(state="attached")
        spans = page.locator(".answer .token")
        body = {"prompt": QUESTION, "max_tokens": TOKENS, "logprobs": 5, "speculation": {"trace": True}}
        [choice] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"]
        assert "".join(spans.all_text_contents()) == choice["text"]
        spans.nth(1).hover()
        chance = choice["logprobs"]["token_logprobs"][1]
        assert f"{100 * math.exp(chance):.0f} %" in page.locator("#details").inner_text()
        assert page.locator("#details tbody tr").count() == 5


def test_a_key_is_asked_for_and_kept_in_memory(open_page, byte_target):
    with serving(ServeConfig(target=byte_target, port=0, served_model_name=MODEL, api_key="sk-right")) as server:
        page = open_page(server.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill("sk-wrong")
        page.keyboard.press("Enter")
        dialog.get_by_text("not one of this server's").wait_for()
        dialog.get_by_label("Key").fill("sk-right")
        page.keyboard.press("Enter")
        page.locator("#model", has_text=MODEL).wait_for()
        assert dialog.is_hidden()
        ask(page)
        stored = page.evaluate("[document.cookie, localStorage.length, sessionStorage.length, location.href].join()")
        assert stored == f",0,0,{server.url}/"
        assert "sk-right" not in page.content() + page.input_value("#key")
        page.reload()
        dialog.wait_for()


def test_errors_say_what_happened_and_what_to_do(open_page, byte_target):
    config = ServeConfig(
        target=byte_target, port=0, served_model_name=MODEL, max_running=1, max_waiting=0, max_model_len=4096
    )
    with serving(config) as server:
        page = open_page(server.url)
        alert = page.get_by_role("alert")
        busy = {"prompt": "x", "max_tokens": 4000, "stream": True, "cache_salt": "slow"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=busy, timeout=120) as stream:
            lines = stream.iter_lines()  # the stream is closed with it
            assert "text" in next(lines)
            ask(page, waits=False)
            alert.get_by_text("The server is full.").wait_for()
        with client_of(server) as client:
            wait_until(lambda: gauge(client, "open_requests") == 0, "the other request has ended")
        page.get_by_role("button", name="Try again").click()
        page.locator("#status", has_text="Done").wait_for(state="attached")
        assert page.locator(".turn").count() == 1
        assert alert.inner_text() == ""
        ask(page, "x" * 5000, waits=False)
        alert.get_by_text("The conversation is too long for the model.").wait_for()
        salted(page, "fail")
        page.click("#new-chat")
        ask(page, waits=False)
        alert.get_by_text("The engine failed during the answer. It says: no memory.").wait_for()
        assert "it ends here, since it failed" in page.locator(".summary").inner_text()
        page.unroute_all()
        page.click("#send")  # its question is back in the field; what failed leaves the page
        page.locator("#status", has_text="Done").wait_for(state="attached")
        assert page.locator(".turn").count() == 1
        salted(page, "crash")
        page.click("#new-chat")
        ask(page, waits=False)
        alert.get_by_text("Start the server again").wait_for()
        page.unroute_all()
        page.get_by_role("button", name="Try again").click()
        alert.get_by_text("The server cannot answer now.").wait_for()
    page.get_by_role("button", name="Try again").click()
    alert.get_by_text("The server cannot be reached.").wait_for()


def test_by_keyboard_alone(open_page, server):
    page = open_page(server.url)
    page.locator("#model", has_text=MODEL).wait_for()
    ask(page)
    page.reload()
    page.locator("#model", has_text=MODEL).wait_for()
    focused = []
    for _ in range(8):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    expected = [
        "Skip to the message field",
        "new-chat",
        "How to read this page",
        "message",
        "compare",
        "example",
        "send",
        "Settings",
    ]
    assert focused[:8] == expected
    page.locator("#message").focus()
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.locator("#status", has_text="Done").wait_for(state="attached")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#details").is_visible()
    assert page.locator(".token.picked").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_that_axe_finds(open_page, server, scheme):
    """With an answer, details and an alert; in the dialog; on the help page. axe knows WCAG's rules."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(server.url, color_scheme=scheme)
    page.check("#compare")
    ask(page)
    page.locator("summary", has_text="Settings").click()
    page.locator(".answer .token.refused").first.hover()
    salted(page, "refuse")
    assert axe.run(page).response["violations"] == []
    ask(page, waits=False)
    page.get_by_role("alert").get_by_text("refused").wait_for()
    page.locator("#key-dialog").evaluate("dialog => dialog.showModal()")
    assert axe.run(page).response["violations"] == []
    page.goto(f"{server.url}/playground/help.html")
    assert axe.run(page).response["violations"] == []


CONTRASTS = """() => {
    const pen = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const linear = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const luminance = (...colors) => {
        for (pen.fillStyle of colors) pen.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(linear);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const root = getComputedStyle(document.body);
    const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const parent = document.getElementById('turns');
    return ['draft', 'ngram', 'grammar'].flatMap((kind) => [1, 2, 3, 4, 5, 6, 8].map((step) => {
        const token = document.createElement('span');
        token.className = `token ${kind}`;
        token.style.setProperty('--step', step);
        parent.append(token);
        const style = getComputedStyle(token);
        const paper = luminance(root.backgroundColor, style.backgroundColor);
        return { kind, step, text: contrast(luminance(root.color), paper), line: style.textDecorationStyle,
            thickness: style.textDecorationThickness, tint: style.backgroundColor,
            mark: contrast(luminance(style.textDecorationColor), luminance(root.backgroundColor)) };
    }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tints_can_be_read_and_told_apart(open_page, server, scheme):
    """WCAG AA: 4.5 for text, 3 for marks. A second cue beside the colour: each origin has a line of its own."""
    contrasts = open_page(server.url, color_scheme=scheme).evaluate(CONTRASTS)
    for contrast in contrasts:
        assert contrast["text"] >= 4.5, contrast
        assert contrast["mark"] >= 3, contrast
    assert {contrast["kind"]: contrast["line"] for contrast in contrasts} == {
        "draft": "solid",
        "ngram": "dashed",
        "grammar": "dotted",
    }
    draft = [contrast for contrast in contrasts if contrast["kind"] == "draft"]
    assert len({contrast["thickness"] for contrast in draft[:4]}) == 4
    assert len({contrast["tint"] for contrast in draft}) == 6


@pytest.mark.slow
def test_with_a_real_engine(open_page):
    """The bundled target with n-grams, and text that a schema fixes: every origin but a draft network's."""
    target = str(TINY)
    config = ServeConfig(target=target, draft="ngram", port=0, width=8)  # whatever passes cost on this machine
    with serving(config, build_engine) as server:
        page = open_page(server.url)
        page.set_default_timeout(60_000)
        page.locator("summary", has_text="Settings").click()
        page.fill("#temperature", "0")
        schema = {"type": "object", "properties": {"unit": {"const": "eggs per day"}}, "required": ["unit"]}
        page.fill("#schema", json.dumps(schema))
        page.check("#compare")
        for _ in range(2):
            ask(page, "How many eggs are in 3 boxes of 12 eggs?", tokens=160)  # it begins with white space
        assert all(verdict.startswith("The same ") for verdict in page.locator(".verdict").all_inner_texts())
        assert page.locator(".answer").nth(2).locator(".token.ngram").count() > 0
        assert page.locator(".answer").first.locator(".token.grammar").count() > 0
        assert page.locator(".answer").nth(1).locator(".token:not(.target)").count() == 0


SHOWN = """() => {
  const bottom = document.getElementById("composer").getBoundingClientRect().top;
  const boxes = [...document.querySelectorAll(".answer .token")].map((token) => token.getBoundingClientRect());
  return boxes.filter((box) => box.top >= 0 && box.bottom <= bottom).length;
}"""


@pytest.mark.parametrize("width", [320, 360, 390, 412])
def test_the_end_of_an_answer_stays_in_sight(open_page, server, width):
    """On phones, where the page grows beyond the screen, until the user scrolls up."""
    page = open_page(server.url, viewport={"width": width, "height": 700}, has_touch=True)
    ask(page, "ab " * 20, tokens=150)
    last = page.locator(".answer .token").last.bounding_box()
    assert last["y"] + last["height"] <= page.locator("#composer").bounding_box()["y"]
    assert page.evaluate(SHOWN) > 10
    salted(page, "slow")
    page.click("#new-chat")
    ask(page, "ab " * 20, tokens=150, waits=False)
    page.locator(".answer .token").nth(3).wait_for()
    page.evaluate("window.scrollTo({top: 0})")
    page.locator(".answer .token").nth(20).wait_for()
    assert page.evaluate("window.scrollY") == 0
    page.keyboard.press("Escape")
    page.locator(".summary", has_text="stopped").wait_for()


def test_a_setting_that_cannot_be_sent_is_shown(open_page, server):
    """Also where the settings are closed, by Send and by Enter."""
    page = open_page(server.url)
    page.locator("#temperature").evaluate("(field) => { field.value = 400; }")
    page.get_by_role("button", name="Fill in an example").click()
    for send in (lambda: page.click("#send"), lambda: page.locator("#message").press("Enter")):
        page.locator("#settings").evaluate("(settings) => { settings.open = false; }")
        send()
        assert page.locator("#settings-problem").inner_text().startswith("Temperature: ")
        assert page.evaluate("document.activeElement.id") == "temperature"
        assert page.input_value("#message") == "Tom has 3 boxes of 12 eggs. How many eggs does he have?"
        assert page.locator(".turn").count() == 0
    page.fill("#temperature", "1")
    page.click("#send")
    page.locator("#status", has_text="Done").wait_for(state="attached")
    assert page.locator("#settings-problem").inner_text() == ""


def test_a_question_is_taken_back(open_page, server):
    page = open_page(server.url)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    for question in ("one", "two", "three"):
        ask(page, question)
    page.get_by_role("button", name="Edit").nth(1).click()
    assert page.locator(".turn").count() == 1
    assert page.input_value("#message") == "two"
    ask(page, "other")
    assert [message["content"] for message in bodies[-1]["messages"] if message["role"] == "user"] == ["one", "other"]


def test_a_narrow_screen_scrolls_one_way(open_page, server):
    """320 pixels, as WCAG's reflow asks; the details stay within."""
    page = open_page(server.url, viewport={"width": 320, "height": 600}, has_touch=True)
    page.check("#compare")
    ask(page, "a" * 60, tokens=60)
    page.locator(".answer .token").nth(20).tap()
    box = page.locator("#details").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 320
    page.locator("h1").tap()
    assert page.locator("#details").is_hidden()
    page.locator("summary", has_text="Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
