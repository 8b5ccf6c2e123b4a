"""The model card of a draft: its target, how to serve it, how many tokens are accepted, what it was trained on."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from slipstream.models.drafts.interchange import SERVERS, Server, broken_rules, layout_for, values_of_json
from slipstream.models.files.checkpoint import Values

LENGTH = "accept_length"
CHAIN_TOKENS = 3  # drafted in a round, the default of `serve`
TITLES = {"eagle3": "EAGLE3", "eagle": "EAGLE", "dflash": "DFLASH", "mtp": "MTP"}
NOT_OPTIONS = (  # of a run: folders, hashes, and how it ran
    *("output", "data.path", "data.aux_states", "draft.vocabulary", "init_from", "target", "tracker.", "checkpoint."),
    *("states.endpoint", "states.engine", "states.devices", "states.prefetch", "states.timeout", "states.api_key_file"),
    *("resume", "dry_run", "data_hash", "vocabulary_hash", "revision", "trust_remote_code"),
)


@dataclass(frozen=True, slots=True)
class Card:
    """`values` of config.json in the public layout, `run` of run.json, `options` of the run by dotted name; empty where
    they are unknown. `layout` of the files: slipstream or speculators."""

    repo: str
    drafter: str
    target: str  # on the hub; empty: unknown
    license: str
    values: Values
    run: Values
    options: Values
    layout: str

    def text(self) -> str:
        return "\n".join(
            [
                *self.header(),
                *self.introduction(),
                *self.serving(),
                *self.acceptance(),
                *self.training(),
            ]
        )

    def header(self) -> list[str]:
        """The metadata that the hub reads."""
        fields: dict[str, Any] = {"license": self.license}
        if self.target:
            fields["base_model"] = self.target
        fields["tags"] = ["speculative-decoding", self.drafter, "slipstream"]
        return ["---", yaml.safe_dump(fields, sort_keys=False).strip(), "---", ""]

    def introduction(self) -> list[str]:
        name = self.repo.partition("/")[2]
        link = f"[{self.target}](https://huggingface.co/{self.target})"
        target = link if self.target else "a model without a public name"
        revision = self.values.get("target_revision")
        rows = {
            "target": target + (f", revision `{revision}`" if revision else ""),
            "target's fingerprint": code(self.values.get("target_fingerprint")),
            "tokenizer's hash": code(self.values.get("tokenizer_hash")),
            "layers": self.values.get("num_hidden_layers"),
            "hidden size": self.values.get("hidden_size"),
            "draft vocabulary": self.values.get("draft_vocab_size"),
            "block": self.values.get("block_size"),
        }
        return [
            f"# {name}",
            "",
            f"A draft model ({TITLES[self.drafter]}) for speculative decoding with {target}. It guesses the next "
            "tokens, which the target checks, so answers stay the target's own.",
            "",
            *table(("", ""), [(name, value) for name, value in rows.items() if value]),
        ]

    def serving(self) -> list[str]:
        target = self.target or "TARGET"
        command = ["serve", "--draft", self.repo, *(() if self.target else ("--target", target))]
        lines = ["## Serve", "", "With Slipstream:", "", f"    {shlex.join(command)}", ""]
        for server in SERVERS:
            lines += [*self.server_lines(server, target), ""]
        return lines

    def server_lines(self, server: Server, target: str) -> list[str]:
        """From the sources of the servers, which were not run."""
        name = SERVERS[server]
        options = values_of_json(self.values, self.drafter)
        rules = broken_rules(server, self.drafter, options)
        if rules:
            reasons = "; ".join(dict.fromkeys(rule.reason for rule in rules))
            return [f"{name} does not load it: it {reasons}."]
        layout = layout_for(server, self.drafter, options)
        if self.layout == "speculators":
            if server == "sglang":
                return [f"{name} loads it after `slipstream convert --layout sglang`."]
        elif layout != "slipstream":
            return [f"{name} loads it after `slipstream convert --layout {layout}`."]
        command = self.sglang_command(target) if server == "sglang" else self.vllm_command(target)
        return [f"With {name} (by its sources, not tried):", "", f"    {command}"]

    @property
    def num_tokens(self) -> int:
        """Tokens drafted in a round."""
        if self.drafter != "dflash":
            return CHAIN_TOKENS
        return int(self.values.get("block_size", 16)) - (0 if self.values.get("sample_from_anchor") else 1)

    @property
    def has_markov(self) -> bool:
        return bool((self.values.get("dflash_config") or {}).get("markov_rank"))

    def sglang_command(self, target: str) -> str:
        algorithm = {"eagle3": "EAGLE3", "eagle": "EAGLE", "dflash": "DSPARK" if self.has_markov else "DFLASH"}
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        words += ["--speculative-algorithm", algorithm[self.drafter], "--speculative-draft-model-path", self.repo]
        if self.drafter != "dflash":
            words += ["--speculative-num-steps", str(self.num_tokens), "--speculative-eagle-topk", "1"]
            words += ["--speculative-num-draft-tokens", str(self.num_tokens + 1)]
        return shlex.join(words)

    def vllm_command(self, target: str) -> str:
        method = "dspark" if self.has_markov else self.drafter
        config = {"method": method, "model": self.repo, "num_speculative_tokens": self.num_tokens}
        return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])

    def acceptance(self) -> list[str]:
        metrics = {name.removeprefix("eval_"): value for name, value in (self.run.get("metrics") or {}).items()}
        if LENGTH not in metrics:
            return []
        temperature = self.options.get("evaluation.temperature")
        at = "" if temperature is None else f" at temperature {temperature:g}"

        def below(prefix: str) -> list[tuple[str, float]]:
            return [(name.removeprefix(prefix), value) for name, value in metrics.items() if name.startswith(prefix)]

        depths = sorted((int(depth), f"{length:.2f}") for depth, length in below("accept_length_at_depth_"))
        rates = sorted((int(place) + 1, f"{rate:.1%}") for place, rate in below("accept_rate_"))
        categories = sorted((name, f"{length:.2f}") for name, length in below("accept_length_by_category/"))
        lines = [
            "## Accepted tokens",
            "",
            f"Simulated on held-out answers{at}: a pass of the target yields **{metrics[LENGTH]:.2f}** tokens on "
            "average (1 without a draft).",
            "",
        ]
        lines += table(("tokens drafted in a round", "accept length"), depths) if depths else []
        lines += table(("position", "accepted in this share of rounds"), rates) if rates else []
        lines += table(("held-out answers", "accept length"), categories) if categories else []
        return lines

    def training(self) -> list[str]:
        """Hashes and counts tell a run's data; its text and folders are left out."""
        versions = self.run.get("versions") or {}
        counts = {name: f"{self.run[name]:,}" for name in ("step", "rows", "tokens") if name in self.run}
        rows = {
            "supervised tokens": counts.get("tokens"),
            "rows": counts.get("rows"),
            "steps": counts.get("step"),
            "hash of the data": code(self.run.get("data_hash")),
            "code": code(self.run.get("git_revision")),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        }
        lines = ["## Training", "", *table(("", ""), [(name, value) for name, value in rows.items() if value])]
        options = {
            name: value
            for name, value in self.options.items()
            if value is not None and not name.startswith(NOT_OPTIONS) and not name.endswith("_fingerprint")
        }
        if options:
            lines += ["Options:", "", *(f"    {name}: {json.dumps(value)}" for name, value in options.items()), ""]
        return lines


def code(text: object) -> str:
    return f"`{text}`" if text else ""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(map(str, cells)) + " |" for cells in lines), ""]
