"""/tokenize and /detokenize: what the model is sent for a text or for messages, and back."""

from dataclasses import replace

import jinja2

from slipstream.serve.chat.forms import TOOL_FORMS
from slipstream.serve.http.frontend import TargetText
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import CHAT, HELLO, SPECIAL, client_of, serving
from slipstream.tests.user_errors import user_error


def test_tokenizer_info_tells_what_clients_need_to_render_prompts(client):
    """As lm-eval reads it (tokenizer_backend=remote): special tokens whose ids /tokenize gives, and the template."""
    info = client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == (SPECIAL[0], None, None)
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == [0]
    text = jinja2.Template(info["chat_template"]).render(messages=HELLO, add_generation_prompt=True)
    tokens = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert tokens == client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]


def test_a_chat_template_of_a_file_is_served(byte_target, tmp_path):
    """For chats and /tokenize, and for what tells the form of calls; a file that is none ends the start."""
    file = tmp_path / "other.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.content }}]{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
        '{% endfor %}{% if tools %}<tool_call>{"arguments"}{% endif %}'
    )
    config = ServeConfig(target=byte_target, port=0, chat_template=str(file))
    with serving(config) as server, client_of(server) as client:
        tokens = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "[hello]"
        deep = {"name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}
        turn = {"role": "assistant", "tool_calls": [{"type": "function", "function": deep}]}
        answer = client.post("/tokenize", json={"messages": [*HELLO, turn]})
        assert "the chat template failed on a value in messages; leave it out" in answer.text
        answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 9}).json()
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        assert client.get("/tokenizer_info").json()["chat_template"] == file.read_text()
        assert server.api.frontend.chat.tools == TOOL_FORMS["hermes"]
    for text, fault in (("{% for", "not valid Jinja"), ("hello", "does not write the messages")):
        file.write_text(text)
        with user_error(fault):
            TargetText.read(config)
    with user_error(r"chat_template is .*missing.*cannot be read"):
        TargetText.read(replace(config, chat_template=str(tmp_path / "missing")))
