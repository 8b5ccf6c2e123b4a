"""config.json of block drafts (DFLASH, DFlash 2, DSpark, LiLiCorr) as other trainers write it, in the fields of ours.

Trainers put a head's fields at the top level or in dflash_config, and call some of them otherwise. They differ in
whether slot 0, whose input is the anchor, predicts the token after it (`convention_of`), and in whether a slot sees
later ones of its block in layers with a window (`_is_non_causal`). Files that leave this open are refused, and so are
heads that the network here lacks.
"""

from typing import Any, NamedTuple

from slipstream.models.drafts.heads.table import CONFIGS, HEADS
from slipstream.models.drafts.layouts import LAYOUTS
from slipstream.models.files.checkpoint import Values, architecture_name

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
# Fields of other trainers' files -> our fields of the same meaning.
ALIASES = {"pard_token": "mask_token_id"} | {name: ours for kind in CONFIGS for name, ours in kind.aliases.items()}
ANCHOR_FIELDS: dict[str, bool] = LAYOUTS["anchor_fields"]
ANCHOR_FIRST: dict[str, bool] = LAYOUTS["anchor_first"]
# How others' tensors begin -> the beginning of DeepSpec's, which are ours; ModelOpt's, and SpecForge's at first.
MODELOPT_NAMES = {name: ours for head in HEADS for name, ours in head.modelopt_names.items()}
HEAD_NAMES = {"logit_head.": "markov_head."} | MODELOPT_NAMES
HEAD_FIELDS = tuple(name for kind in CONFIGS for name in kind.names())  # of dflash_config
CAUSAL_FIELDS = ("causal", "is_causal", "dflash_query_causal")
UNSUPPORTED_PROJECTORS = LAYOUTS["unsupported_projectors"]
PROJECTORS = sorted({"dflash", *(kind.projector for kind in CONFIGS)})
UNSUPPORTED: dict[str, list[Any]] = LAYOUTS["unsupported"]


class Convention(NamedTuple):
    """Which token slot k of a block predicts: with `from_anchor` the token after it, else the token at its own
    place."""

    from_anchor: bool
    reason: str

    def __str__(self) -> str:
        slots = (
            "every slot predicts the token after it" if self.from_anchor else "slots 1, 2, ... predict their own token"
        )
        return f"{slots}: {self.reason}"


def convention_of(values: Values, choice: bool | None = None) -> Convention:
    """Returns the convention of a config.json; `choice` is the user's. Raises ValueError where fields, or field and
    choice, contradict each other, and where nothing decides."""
    config = merged(values)
    anchors = {
        name: bool(config[name]) is means for name, means in ANCHOR_FIELDS.items() if config.get(name) is not None
    }
    settings = ", ".join(f"{name} {str(bool(config[name])).lower()}" for name in anchors)
    if len(set(anchors.values())) > 1:
        raise ValueError(f"draft config has {settings}: these contradict each other; delete the wrong one")
    if anchors:
        (from_anchor,) = set(anchors.values())
        if choice is not None and choice != from_anchor:
            raise ValueError(
                f"sample_from_anchor is {str(choice).lower()}, but the draft's config.json has {settings}; leave the "
                "option out"
            )
        return Convention(from_anchor, f"its config.json has {settings}")
    if choice is not None:
        return Convention(choice, "as the option sample_from_anchor says")
    architecture = architecture_name(values)
    has_markov = bool(config.get("markov_rank"))
    if architecture not in ANCHOR_FIRST or (has_markov and not ANCHOR_FIRST[architecture]):
        name = f"{architecture} with a Markov head" if has_markov else architecture
        raise ValueError(
            f"draft config lacks sample_from_anchor, and drafts of architecture {name} are trained either way; say by "
            "the option sample_from_anchor whether slot 0, the anchor, predicts the token after it (serve: "
            "--drafter.sample-from-anchor true|false, convert: --sample-from-anchor)"
        )
    return Convention(ANCHOR_FIRST[architecture], f"its architecture is {architecture}, and sample_from_anchor absent")


def merged(values: Values) -> dict[str, Any]:
    """The fields of both levels under our names. Raises ValueError for one that has two values."""
    config: dict[str, Any] = {}
    levels = ("", values), (", in dflash_config", values.get("dflash_config") or {})
    for level, fields in levels:
        for name, value in fields.items():
            ours = ALIASES.get(name, name)
            if value is None or name == "dflash_config":
                continue
            if ours in config and config[ours] != value:
                other = f"and{level}," if level else "and"
                alias = "" if name == ours else f"{name} "
                raise ValueError(f"draft config: {ours} is {config[ours]} {other} {alias}{value}; delete one")
            config[ours] = value
    return config


def settle_block(values: Values, choice: bool | None) -> dict[str, Any]:
    """Another trainer's config.json, or ours, with all of a block draft's own fields in dflash_config and the
    convention at the top level. Raises ValueError for what the network here cannot run, and for what is uncertain."""
    config = merged(values)
    _refuse(values, config)
    from_anchor = convention_of(values, choice).from_anchor
    nested = dict(values.get("dflash_config") or {})
    nested |= {name: config[name] for name in (*PLAIN_FIELDS, *HEAD_FIELDS) if config.get(name) is not None}
    if layers := _layers(config):
        nested["target_layer_ids"] = layers
    settled = {**values, **_window(values, config), "dflash_config": nested, "sample_from_anchor": from_anchor}
    dropped = (*ANCHOR_FIELDS, *CAUSAL_FIELDS, *ALIASES, "use_swa", "swa_window_size")
    for name in dropped:
        nested.pop(name, None)
    return {name: value for name, value in settled.items() if name == "sample_from_anchor" or name not in dropped}


PLAIN_FIELDS = (  # of dflash_config, besides those of heads
    *("mask_token_id", "conv_kernel_size", "conv_group_size", "output_multiplier", "final_logit_softcapping"),
    "input_embedding_scale",
    *("tap_norms", "context_norms", "output_gate"),
)


def _refuse(values: Values, config: Values) -> None:
    projector = str(config.get("projector_type") or "dflash")
    if projector.lower() in UNSUPPORTED_PROJECTORS:
        raise ValueError(f"draft config: {UNSUPPORTED_PROJECTORS[projector.lower()]} is not supported")
    if projector not in PROJECTORS:
        raise ValueError(f"draft config: projector_type is {projector!r}; supported: {', '.join(PROJECTORS)}")
    for head in CONFIGS:
        head.refuse(config)
    if config.get("dspark_block_size") or config.get("dspark_noise_token_id"):
        raise ValueError("this is DeepSeek-V4's draft, which is part of the target's checkpoint; it is not supported")
    for name, neutral in UNSUPPORTED.items():
        if config.get(name) not in neutral:
            raise ValueError(f"draft config sets {name} to {config[name]!r}, which is not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"draft config: hidden_act is {values['hidden_act']!r}; only 'silu' is supported")


def _layers(config: Values) -> list[int]:
    """Output ids, from either field. Raises ValueError if these name different states."""
    outputs = config.get("target_layer_ids")
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    if not inputs:
        return list(outputs or ())
    layers = [layer - 1 for layer in inputs]
    if outputs and list(outputs) != layers:
        raise ValueError(
            f"draft config: target_layer_ids is {outputs}, layer outputs, and eagle_aux_hidden_state_layer_ids "
            f"{inputs}, layer inputs: these are different states; delete the wrong one"
        )
    return layers


def _window(values: Values, config: Values) -> dict[str, Any]:
    """The window, where ModelOpt's fields have it, and whether slots see later ones there."""
    fields: dict[str, Any] = {}
    types = values.get("layer_types")
    num_layers = int(config.get("num_hidden_layers") or 0)
    if config.get("use_swa"):
        window = config.get("swa_window_size") or values.get("sliding_window")
        if not window or values.get("sliding_window") not in (None, window):
            raise ValueError(
                f"draft config: use_swa is true, swa_window_size {config.get('swa_window_size')} and sliding_window "
                f"{values.get('sliding_window')}; one must be set, and both equal if they are"
            )
        types = types or ["sliding_attention"] * num_layers
        fields |= {"sliding_window": window, "use_sliding_window": True, "layer_types": types}
    has_window = "sliding_attention" in types if types else bool(values.get("use_sliding_window"))
    return fields | {"sliding_window_non_causal": _is_non_causal(values, config, types, has_window=has_window)}


def _is_non_causal(values: Values, config: Values, types: list[str] | None, *, has_window: bool) -> bool:
    """Whether a slot sees later ones of its block in layers with a window, as it does in the others.

    DFlash 2 says so by is_causal false, and speculators by sliding_window_non_causal, which is true of its DFlash 2
    drafts if it is absent; other drafts with windows are causal there.
    """
    causal = {name: bool(config[name]) for name in CAUSAL_FIELDS if config.get(name) is not None}
    if len(set(causal.values())) > 1:
        raise ValueError(f"draft config has {causal}: these contradict each other; delete the wrong one")
    is_causal = next(iter(causal.values()), None)
    if is_causal and not (has_window and types and set(types) == {"sliding_attention"}):
        raise ValueError(
            f"draft config sets {', '.join(causal)}: layers that see all tokens but no later slot of their "
            "block are not supported"
        )
    if not has_window:
        return False
    non_causal = config.get("sliding_window_non_causal")
    if non_causal is not None and is_causal is not None and bool(non_causal) == is_causal:
        raise ValueError(
            f"draft config: sliding_window_non_causal is {non_causal} and {next(iter(causal))} {is_causal}; delete the "
            "wrong one"
        )
    if non_causal is not None:
        return bool(non_causal)
    return not is_causal if is_causal is not None else architecture_name(values) == "DFlash2DraftModel"
