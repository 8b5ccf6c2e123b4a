"""Tokenizers and targets whose answers have forms: the bundled target with markers as tokens, and its first layers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.tests.random_targets import change_json
from slipstream.tests.sources import TINY
from slipstream.tests.tables import table_of

MESSAGES = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "REASONING{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}CALLS{%- endfor -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}OPENING{%- endif -%}"
)
REASONING = (
    "{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif -%}"
)
TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>system\n' }}{%- for tool in tools -%}{{ tool | tojson }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endif -%}"
)
OPENING = "{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}"
# By form: how its template writes reasoning, and how it begins an answer.
REASONING_PARTS = {
    "hermes": (REASONING, OPENING),
    "glm": (
        "{{- '\n<think>' + (message.reasoning_content or '') + '</think>\n' if message.role == 'assistant' else '' -}}",
        "{%- if enable_thinking is false %}{{ '\n<think></think>' }}{% endif -%}",
    ),
    "minimax_m2": (REASONING, "{{- '<think>\n' -}}"),
    "gemma4": ("", "{%- if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif -%}"),
}

TEMPLATES: dict[str, tuple[list[str], str]] = table_of(__file__, "templates")


def template(form: str) -> str:
    reasoning, opening = REASONING_PARTS.get(form, ("", ""))
    text = TOOLS + MESSAGES.replace("CALLS", TEMPLATES[form][1])
    return text.replace("REASONING", reasoning).replace("OPENING", opening)


def write_shallow(folder: Path) -> Path:
    """The first three of the bundled target's six layers, for answers that need not be good."""
    shutil.copytree(TINY, folder)
    change_json(folder / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    tensors = load_file(folder / "model.safetensors")
    shallow = {name: tensor for name, tensor in tensors.items() if not re.match(r"model\.layers\.[345]\.", name)}
    save_file(shallow, folder / "model.safetensors")
    return folder


def write_target(form: str, folder: Path) -> Path:
    """The bundled target with the markers of a form as tokens, and a chat template of that kind."""
    folder.mkdir()
    names = {f"<|spare_{index}|>": marker for index, marker in enumerate(TEMPLATES[form][0])}
    for file in TINY.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        elif file.name in ("tokenizer.json", "tokenizer_config.json"):
            values = renamed(json.loads(file.read_text()), names)
            (folder / file.name).write_text(json.dumps(values))
        elif file.suffix == ".json":
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(template(form))
    return folder


def renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): renamed(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [renamed(inner, names) for inner in value]
    return names.get(value, value) if isinstance(value, str) else value


def load(form: str, folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(write_target(form, folder))
