"""Which drafts SGLang and vLLM load, by the options that made them.

This table decides for `draft.interchange` of training, for `slipstream convert` and for model cards; docs/convert.md
shows it. It states what the loaders in the sources of these versions do; the servers were not run. Imports nothing that
takes long.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Server = Literal["sglang", "vllm"]
# Norms of an EAGLE3 draft by their public names: the flags of EAGLE-3.1, and Qwen3's norms of queries and keys.
Norm = Literal["fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "qk_norm"]
NORMS: tuple[Norm, ...] = get_args(Norm)
Values = Mapping[str, Any]  # options of `draft` by name; an absent one, or None, takes a default that loads

SERVERS: dict[Server, str] = {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.33"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A limit that a server's loader sets on one option of `draft`."""

    option: str
    holds: Callable[[Values], bool]
    value: Any  # the nearest one that loads; None: leave the option out
    reason: str  # continues a sentence that begins with the server

    @property
    def remedy(self) -> str:
        if self.option == "aux_layers":
            return "name several outputs of earlier layers, in ascending order"
        return "leave it out" if self.value is None else f"give {shown(self.value)}"


def shown(value: Any) -> str:
    """A value as users write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def requires(option: str, value: Any, reason: str, *, unless: Iterable[str] = ()) -> Rule:
    """The option has this value; any of the options `unless` lifts that."""

    def holds(values: Values) -> bool:
        return values.get(option, value) in (value, None) or any(values.get(name) for name in unless)

    return Rule(option, holds, value, reason)


def excludes_norm(norm: Norm, reason: str) -> Rule:
    return Rule("norms", lambda values: norm not in values.get("norms", ()), ("fc_norm", "norm_output"), reason)


def is_ascending(values: Values) -> bool:
    layers = values.get("aux_layers")
    return layers is None or all(first < second for first, second in zip(layers, layers[1:], strict=False))


def states_before_end(margin: int) -> Callable[[Values], bool]:
    """No state is one of the last `margin` layer outputs, or the one after the final norm; as far as the target's depth
    is known. A draft without fc reads the latter in another way."""

    def holds(values: Values) -> bool:
        layers = values.get("aux_layers")
        depth = values.get("target_num_layers")
        return layers is None or depth is None or not values.get("has_fc", True) or max(layers) < depth - margin

    return holds


def has_several_states(values: Values) -> bool:
    layers = values.get("aux_layers")
    return layers is None or len(layers) > 1 or not values.get("has_fc", True)


ASCENDING = Rule("aux_layers", is_ascending, None, "hands states over in the order of the layers")
SGLANG_STATES = Rule("aux_layers", states_before_end(1), None, "has no state after the last layer")
VLLM_STATES = Rule("aux_layers", states_before_end(0), None, "has no state after the final norm")
ANCHOR = requires(
    "sample_from_anchor", False, "lets the anchor predict only in drafts with a Markov head", unless=["markov_rank"]
)
CONFIDENCE = requires(
    "confidence_head", False, "has confidence heads only beside a Markov head", unless=["markov_rank"]
)
CONVOLUTIONS = requires(
    "conv", False, "has convolutions only beside a selector or LiLiCorr", unless=["selector_rank", "lilicorr"]
)
LAGUNA = "has them only in files of Laguna's maker, which name another architecture"
LAGUNA_PARTS = (
    requires("tap_norms", False, LAGUNA),
    requires("context_norms", False, LAGUNA),
    requires("gate", None, LAGUNA),
)
MTP_CHECKPOINT = Rule(
    "interchange",
    lambda _: False,
    "own",
    "reads MTP heads in the target's files alone, where `slipstream convert --layout target` puts those of its form",
)
RULES: dict[tuple[Server, str], tuple[Rule, ...]] = {
    ("sglang", "eagle3"): (
        excludes_norm("norm_before_residual", "adds to the hidden state before its norm, whatever the file says"),
        excludes_norm("qk_norm", "has no norms of queries and keys in an EAGLE3 layer"),
        requires("num_layers", 1, "looks for the norms of further layers under another name"),
        requires("attention_bias", False, "has no biases of queries, keys and values in an EAGLE3 layer"),
        Rule("aux_layers", has_several_states, None, "does not apply fc to a single state"),
        ASCENDING,
        SGLANG_STATES,
    ),
    ("vllm", "eagle3"): (ASCENDING, VLLM_STATES),
    ("sglang", "eagle"): (
        requires("bias", True, "leaves the bias of fc random where the file has none"),
        requires("qkv_bias", False, "has no biases of queries, keys and values in an EAGLE layer"),
        requires("vocabulary", None, "ignores the token map of an EAGLE draft (it has --speculative-token-map)"),
    ),
    ("vllm", "eagle"): (
        Rule("interchange", lambda _: False, "own", "has no loader for the architecture LlamaForCausalLMEagle"),
    ),
    ("sglang", "mtp"): (MTP_CHECKPOINT,),
    ("vllm", "mtp"): (MTP_CHECKPOINT,),
    ("sglang", "dflash"): (
        requires("vocabulary", None, "ignores the token map of a block draft"),
        ANCHOR,
        CONFIDENCE,
        CONVOLUTIONS,
        *LAGUNA_PARTS,
        ASCENDING,
        SGLANG_STATES,
    ),
    ("vllm", "dflash"): (
        ANCHOR,
        CONFIDENCE,
        CONVOLUTIONS,
        *LAGUNA_PARTS,
        Rule(
            "conv",
            lambda values: bool(values.get("conv")) or not values.get("selector_rank"),
            True,
            "has the selector only beside convolutions",
        ),
        Rule(
            "markov_head_type",
            lambda values: values.get("markov_head_type", "vanilla") == "vanilla" or not values.get("markov_rank"),
            "vanilla",
            "has no gated Markov head",
        ),
        Rule(
            "vocabulary",
            lambda values: (
                values.get("vocabulary") is None or not (values.get("selector_rank") or values.get("lilicorr"))
            ),
            None,
            "has the selector and LiLiCorr only with the target's whole vocabulary",
        ),
        Rule(
            "vocabulary",
            lambda values: values.get("vocabulary") is None or values.get("sliding_window") is None,
            None,
            "reads windows otherwise in the layout that a token map needs (speculators)",
        ),
        ASCENDING,
        VLLM_STATES,
    ),
}


def broken_rules(server: Server, drafter: str, values: Values) -> list[Rule]:
    """Why the server does not load such a draft; empty: it does."""
    return [rule for rule in RULES[server, drafter] if not rule.holds(values)]


def nearest_values(server: Server, drafter: str, values: Values) -> dict[str, Any]:
    """The options to change, and to what, so that the server loads such a draft."""
    changed = dict[str, Any]()
    for rule in RULES[server, drafter]:
        if not rule.holds({**values, **changed}):
            changed[rule.option] = rule.value
    return changed


def check_options(server: str, drafter: str, values: Values) -> None:
    """Raises ValueError for an option of training that gives a draft which the server `draft.interchange` does not
    load."""
    if server == "own":
        return
    for rule in broken_rules(server, drafter, values):  # type: ignore[arg-type]
        remedy = rule.remedy if rule.option == "interchange" else f"{rule.remedy}, or set draft.interchange to own"
        raise ValueError(
            f"draft.{rule.option} is {shown(values.get(rule.option))}, but draft.interchange is {server}: "
            f"{SERVERS[server]} {rule.reason}; {remedy}"  # type: ignore[index]
        )


def draft_values(config: Any) -> dict[str, Any]:
    """A draft's config under the names of the options that made it."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for head in values.pop("heads", ()):
        values |= head.to_options()
    size = values["draft_vocab_size"]
    values["vocabulary"] = None if size == values["vocab_size"] else size
    values["conv"] = bool(values.get("conv_kernel_size"))
    values["bias"] = values.get("fc_bias", True)
    values["norms"] = tuple(norm for norm in NORMS if values.get(norm))
    return values


def layout_for(server: Server, drafter: str, values: Values) -> str:
    """The layout of `slipstream convert` in which the server loads such a draft; slipstream: as training writes it."""
    needs_head = server == "vllm" and drafter == "dflash" and values.get("vocabulary") is not None
    return "speculators" if needs_head else "slipstream"


def values_of_json(values: Mapping[str, Any], drafter: str) -> dict[str, Any]:
    """`draft_values` of a config.json that training wrote, as far as the rules need them."""
    size = values.get("draft_vocab_size")
    shared = {
        "target_num_layers": values.get("target_num_layers") or values.get("num_target_layers"),
        "num_layers": values.get("num_hidden_layers"),
        "vocabulary": None if size == values.get("vocab_size") else size,
    }
    if drafter == "mtp":
        return shared
    if drafter == "eagle":
        return shared | {"bias": values.get("bias", True), "qkv_bias": values.get("qkv_bias", False)}
    if drafter == "eagle3":
        flags = {**values, "qk_norm": values.get("model_type") == "qwen3"}
        nested = values.get("eagle_config") or {}
        return {
            **shared,
            "norms": tuple(norm for norm in NORMS if flags.get(norm)),
            "attention_bias": values.get("attention_bias", False),
            "has_fc": nested.get("use_aux_hidden_state", True),
            "aux_layers": nested.get("eagle_aux_hidden_state_layer_ids"),
        }
    fields = values.get("dflash_config") or {}
    heads = ("selector_rank", "markov_rank", "markov_head_type")
    return {
        **shared,
        **{head: fields[head] for head in heads if head in fields},
        "sample_from_anchor": values.get("sample_from_anchor", False),
        "conv": bool(fields.get("conv_kernel_size")),
        "confidence_head": bool(fields.get("enable_confidence_head")),
        "lilicorr": fields.get("lilicorr_candidate_topk"),
        "tap_norms": fields.get("tap_norms", False),
        "context_norms": fields.get("context_norms", False),
        "gate": fields.get("output_gate"),
        "sliding_window": values.get("sliding_window"),
        "aux_layers": fields.get("target_layer_ids"),
    }
