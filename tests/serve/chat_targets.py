"""Tokenizers and targets whose answers have forms: the bundled target's, whose spare tokens are markers."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.tests.sources import TINY

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

# By form: its markers that are tokens, and how its chat template writes a call, much shortened.
TEMPLATES: dict[str, tuple[list[str], str]] = {
    "hermes": (
        ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}",
    ),
    "qwen3_coder": (
        ["<tool_call>", "</tool_call>"],
        "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
        "{%- for name, value in call.function.arguments.items() -%}"
        "{{ '<parameter=' + name + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}"
        "{%- endfor -%}{{ '</function>\n</tool_call>' }}",
    ),
    "glm": (
        [
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ],
        "{{ '\n<tool_call>' + call.function.name + '\n' }}"
        "{%- for name, value in call.function.arguments.items() -%}{{ '<arg_key>' + name + '</arg_key>\n<arg_value>' }}"
        "{{ value if value is string else value | tojson }}{{ '</arg_value>\n' }}"
        "{%- endfor -%}{{ '</tool_call>' }}",
    ),
    "minimax_m2": (
        ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
        "{%- if loop.first %}{{ '\n<minimax:tool_call>\n' }}{% endif -%}"
        "{{ '<invoke name=\"' + call.function.name + '\">\n' }}"
        "{%- for name, value in call.function.arguments.items() -%}{{ '<parameter name=\"' + name + '\">' }}"
        "{{ value if value is string else value | tojson }}{{ '</parameter>\n' }}{%- endfor -%}{{ '</invoke>\n' }}"
        "{%- if loop.last %}{{ '</minimax:tool_call>' }}{% endif -%}",
    ),
    "gemma4": (
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
        "{{ '<|tool_call>call:' + call.function.name + '{' }}"
        "{%- for name, value in call.function.arguments.items() -%}{{ ('' if loop.first else ',') + name + ':' }}"
        "{{ '<|\"|>' + value + '<|\"|>' if value is string else value | tojson }}{%- endfor -%}"
        "{{ '}<tool_call|>' }}",
    ),
    "deepseek_v3": (
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}"
        "{{ '\n```json\n' + call.function.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
    ),
    "deepseek_v3_1": (
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
        "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}"
        "{{ call.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
    ),
    "deepseek_v3_2": (
        ["｜DSML｜"],
        "{{ '<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"' + call.function.name + '\">\n' }}"
        "{{ '</｜DSML｜invoke>\n</｜DSML｜function_calls>' }}",
    ),
    "mistral": (
        ["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
        '{{ \'[TOOL_CALLS][{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{ call.function.arguments | tojson }}{{ '}]' }}",
    ),
    "mistral_v11": (
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{ call.function.arguments | tojson }}",
    ),
    "llama_json": (
        ["<|python_tag|>"],
        "{%- if false %}ipython{% endif -%}"
        '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
        "{{ call.function.arguments | tojson }}{{ '}' }}",
    ),
    "llama_pythonic": (["<|python_start|>", "<|python_end|>"], "{{ '[func_name1(' }}"),
    "harmony": (
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
        "{{ '<|channel|>commentary to=functions.' + call.function.name + ' <|constrain|>json<|message|>' }}"
        "{{ call.function.arguments | tojson }}{{ '<|call|>' }}",
    ),
}


def template(form: str) -> str:
    reasoning, opening = REASONING_PARTS.get(form, ("", ""))
    text = TOOLS + MESSAGES.replace("CALLS", TEMPLATES[form][1])
    return text.replace("REASONING", reasoning).replace("OPENING", opening)


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
