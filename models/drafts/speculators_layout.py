"""The config.json of the speculators library, which vLLM also reads: to and from the public fields of a draft.

It describes the decoder in a nested config (`transformer_layer_config`), names the verifier (our target), and counts
captured states as layer inputs: our output id + 1. Tensors of EAGLE3's layer are called layers.0.*, and a draft with
the whole vocabulary has no d2t and t2d.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.models.drafts.layouts import LAYOUTS, check_types

if TYPE_CHECKING:
    from torch import Tensor

Values = Mapping[str, Any]  # of config.json
VERSION = "0.9.0"  # of the library, tested against this module
OWN = (
    *("drafter", "num_target_layers", "target_num_layers"),
    *("target", "target_revision", "target_fingerprint", "tokenizer_hash"),
)
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_FLAGS: list[str] = LAYOUTS["eagle3_flags"]
DECODER_FIELDS: list[str] = LAYOUTS["decoder_fields"]
KINDS: dict[str, dict[str, Any]] = LAYOUTS["speculators"]
CALIBRATION = ("confidence_temperatures", "confidence_biases")  # the library keeps fields that it does not know
BLOCK_HEADS = {kind: facts["heads"] for kind, facts in KINDS.items() if "heads" in facts}
BLOCK_FIELDS = {  # of dflash_config, that it has places for or does not need
    *("mask_token_id", "target_layer_ids", "projector_type", *CALIBRATION),
    *(name for fields in BLOCK_HEADS.values() for name in fields),
}
OTHER_KINDS = LAYOUTS["unsupported_speculators"]
EAGLE3_TOKENS = 3  # per round by default, also ours


def to_speculators(values: Values, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """A draft's public config.json -> the same in this layout; `verifier` is the target, by folder or hub id.

    Raises ValueError for a draft that this layout cannot describe.
    """
    kind = _block_kind(values) if values["drafter"] == "dflash" else values["drafter"]
    tokens, fields = _block_fields(values, kind) if kind in BLOCK_HEADS else _eagle3_fields(values)
    return {
        "architectures": [KINDS[kind]["architecture"]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {name: values[name] for name in DECODER_FIELDS if name in values},
        "draft_vocab_size": values.get("draft_vocab_size") or values["vocab_size"],
        **fields,
        "tie_word_embeddings": False,
        **{name: values[name] for name in ("torch_dtype", *OWN) if name in values},
    }


def _block_kind(values: Values) -> str:
    """Raises ValueError for heads that the library has not, or not together."""
    config = values["dflash_config"]
    has_markov = bool(config.get("markov_rank") or config.get("enable_confidence_head"))
    has_second = bool(config.get("conv_kernel_size")), bool(config.get("selector_rank"))
    odd = [name for name in config if name not in BLOCK_FIELDS]
    if any(has_second) and (has_markov or not all(has_second)):
        odd += [name for name in ("conv_kernel_size", "selector_rank", "markov_rank") if config.get(name)]
    if all(has_second) and values.get("draft_vocab_size"):
        odd.append("draft_vocab_size")
    if odd:
        raise ValueError(
            f"this draft has {', '.join(odd)}; the library speculators has block drafts without heads, with a Markov "
            "and a confidence head, or, of the whole vocabulary, with convolution and selector"
        )
    return "dflash2" if all(has_second) else "dspark" if has_markov else "dflash"


def _block_fields(values: Values, kind: str) -> tuple[int, dict[str, Any]]:
    """Tokens drafted in a round, and this draft's own fields. vLLM applies `sliding_window_non_causal` to all
    layers of a draft without windows, so there it is true."""
    config = values["dflash_config"]
    from_anchor = values.get("sample_from_anchor", False)
    has_window = values.get("sliding_window") is not None
    heads = {name: config.get(name, False) for name in BLOCK_HEADS[kind]}
    if kind == "dspark":
        heads |= {
            "markov_rank": config.get("markov_rank", 0),
            "markov_head_type": config.get("markov_head_type", "vanilla"),
        }
        heads["confidence_head_with_markov"] = config.get("confidence_head_with_markov", bool(heads["markov_rank"]))
        heads |= {name: config[name] for name in CALIBRATION if config.get(name)}
    return values["block_size"] - (0 if from_anchor else 1), {
        "target_hidden_size": values["hidden_size"],
        "block_size": values["block_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "mask_token_id": config["mask_token_id"],
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": values.get("sliding_window_non_causal", False) or not has_window,
        **heads,
    }


def _eagle3_fields(values: Values) -> tuple[int, dict[str, Any]]:
    """As above. Writes flags that are off, too, since vLLM takes a missing norm_before_residual as on."""
    if values.get("attention_bias"):
        raise ValueError("this draft has biases for q, k and v alone (attention_bias); speculators has one for o, too")
    if not (values.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise ValueError("this draft has no fc (use_aux_hidden_state false); in speculators every EAGLE3 draft has one")
    if values["target_hidden_size"] != values["hidden_size"]:
        raise ValueError(
            f"this draft is {values['hidden_size']} wide and its target {values['target_hidden_size']} "
            "(target_hidden_size); in speculators both must be equal"
        )
    layers = {AUX_LAYERS: values[AUX_LAYERS]} if values.get(AUX_LAYERS) else {}
    target_size = {"target_hidden_size": values["target_hidden_size"]}
    return EAGLE3_TOKENS, {**target_size, **layers, **{flag: values.get(flag, False) for flag in EAGLE3_FLAGS}}


def speculators_kind(values: Values) -> str | None:
    """The kind of draft in a config.json of this layout; None for another layout. Raises ValueError for other kinds."""
    kind = values.get("speculators_model_type")
    if kind is not None and str(kind) not in KINDS:
        label = f" ({OTHER_KINDS[kind]})" if str(kind) in OTHER_KINDS else ""
        raise ValueError(f"speculators_model_type is {kind!r}{label}; supported: {', '.join(KINDS)}")
    return kind


def drafter_of_kind(kind: str) -> str:
    """Its drafter here."""
    return "dflash" if kind in BLOCK_HEADS else kind


def from_speculators(values: dict[str, Any]) -> dict[str, Any]:
    """The inverse; a config of another layout stays as it is. Raises ValueError for another kind of draft, for a field
    of the wrong type and for a config that lacks what the public fields need."""
    check_types(values)
    kind = speculators_kind(values)
    if kind is None:
        return values
    required = ("transformer_layer_config", *(("aux_hidden_state_layer_ids",) if kind in BLOCK_HEADS else ()))
    missing = [name for name in required if not values.get(name)]
    if missing:
        raise ValueError(f"draft config lacks {', '.join(missing)}")
    if kind == "eagle3" and "norm_before_residual" not in values:
        raise ValueError(
            "draft config lacks norm_before_residual, which vLLM then takes as true and the library as false; add it "
            "as the draft was trained"
        )
    inside = values["transformer_layer_config"]
    drafter = drafter_of_kind(kind)
    public = {**inside, **values, "architectures": [KINDS[kind]["public"]], "drafter": drafter}
    if kind in BLOCK_HEADS:
        public["dflash_config"] = {
            "mask_token_id": values.get("mask_token_id"),
            "target_layer_ids": [layer - 1 for layer in values["aux_hidden_state_layer_ids"]],
            **{name: values.get(name, default) for name, default in BLOCK_HEADS[kind].items()},
            **{name: values[name] for name in CALIBRATION if values.get(name)},
        }
    elif inside.get("model_type", "qwen3") not in ("llama", "qwen3"):  # without one it is the library's default
        raise ValueError(
            f"transformer_layer_config.model_type is {inside['model_type']!r}; an EAGLE3 draft's layer must be 'llama' "
            "or 'qwen3'"
        )
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    public.setdefault("target", verifier.get("name_or_path") or "")
    if public.get("draft_vocab_size") == inside.get("vocab_size"):
        public.pop("draft_vocab_size", None)
    moved = ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id")
    return {name: value for name, value in public.items() if name not in moved and "speculators" not in name}


def without_last_layer(layers: list[int], last: int, tensors: Mapping[str, "Tensor"], target_size: int) -> list[int]:
    """`layers`, but for `last`, the id of the target's last layer, which trainers append to record the teacher's state:
    where the draft's fc reads one state of `target_size` fewer."""
    num_inputs = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else None
    is_appended = layers[-1:] == [last] and num_inputs == (len(layers) - 1) * target_size
    return layers[:-1] if is_appended else layers


def layer_name(key: str) -> str:
    """The name in this layout of a tensor of EAGLE3's layer, given its public name."""
    return key.replace("midlayer.", "layers.0.", 1) if key.startswith("midlayer.") else key
