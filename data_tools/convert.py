"""Writes a draft checkpoint in the layout that another server or trainer reads.

    slipstream convert --input runs/draft --layout speculators --output runs/draft-vllm
    slipstream convert --input owner/draft --target Qwen/Qwen3-8B --layout sglang --output runs/draft

Reads every layout that it writes, and all that `serve` loads. Every kind of draft has one public layout, ours too;
other layouts are made from it. Weights keep their bits; a draft that does not fit its target, or that another layout
cannot hold, is refused.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.config import run
from slipstream.data_tools.convert_mtp import TARGET, Source, extract, provenance, stitch
from slipstream.data_tools.options import show_table
from slipstream.data_tools.verb_options import ConvertConfig
from slipstream.models.drafts.adapters import is_adapter
from slipstream.models.drafts.base import EMBEDDING, HEAD, Choices, DraftNetwork, load_draft
from slipstream.models.drafts.block_layouts import (
    ALIASES,
    ANCHOR_FIELDS,
    CAUSAL_FIELDS,
    MODELOPT_NAMES,
    OFF,
    PLAIN_FIELDS,
    UNSUPPORTED,
    convention_of,
)
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.eagle import Eagle
from slipstream.models.drafts.eagle3 import POST_NORM, Eagle3
from slipstream.models.drafts.heads.table import CONFIGS
from slipstream.models.drafts.interchange import SERVERS, broken_rules, draft_values, shown
from slipstream.models.drafts.layouts import LAYOUTS
from slipstream.models.drafts.mtp import MTP
from slipstream.models.drafts.source import drafter_of
from slipstream.models.drafts.speculators_layout import (
    AUX_LAYERS,
    DECODER_FIELDS,
    EAGLE3_FLAGS,
    OWN,
    from_speculators,
    layer_name,
    to_speculators,
)
from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.checkpoint import (
    Values,
    named_target,
    read_draft_tensors,
    read_json,
    read_tensors,
    resolve,
    write_checkpoint,
)
from slipstream.models.files.outputs import CHECKPOINT, check_output_folder
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.formats.base import Tensors
from slipstream.models.targets.decoder import decoder_tensors, drop_tied_head, load_config
from slipstream.models.targets.families import MTP_FORMS, architecture_of

CPU = torch.device("cpu")
# Fields of config.json that drafts of every kind may have.
FIELDS = (*DECODER_FIELDS, *OWN, *LAYOUTS["other_fields"], *LAYOUTS["idle_fields"])
BLOCK_FIELDS = (
    *("block_size", "target_layer_ids", "sliding_window_non_causal", "projector_type", *PLAIN_FIELDS, *UNSUPPORTED),
    *(*ALIASES, *ANCHOR_FIELDS, *CAUSAL_FIELDS, "use_swa", "swa_window_size", "eagle_aux_hidden_state_layer_ids"),
    *(name for kind in CONFIGS for name in (*kind.names(), *kind.foreign)),
    # Of training, or what the tensors show
    *("num_anchors", "num_aux_layers", "has_embed_tokens", "has_lm_head", "train_embed_tokens"),
)


class Draft(NamedTuple):
    """A checkpoint's config.json and tensors, in one layout."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    layers: tuple[int, ...]  # target states it picks (ids of models/targets/config.py); EAGLE picks none
    options: Values  # those that made it (models/drafts/interchange.py)


class Form(NamedTuple):
    """Drafts of one kind: their network, and what makes each layout of the public one."""

    network: type[DraftNetwork]
    layouts: Mapping[str, Callable[[Draft, Source], Draft]]
    fields: tuple[str, ...]  # of config.json, besides FIELDS


def convert(config: ConvertConfig) -> None:
    """Writes `config.output` and prints how much of the draft kept its name."""
    inputs = {"input": [config.input], "target": [config.target]}
    kind = TARGET if config.layout == "target" else CHECKPOINT
    check_output_folder(config.output, kind, inputs, overwrite=config.overwrite)
    path = resolve(config.input)
    values = read_json(path / "config.json")
    if architecture_of(values) in MTP_FORMS and "drafter" not in values:
        convert_target(config)
        return
    form = form_of(values, config)
    name = config.target or named_target(path)
    if not name:
        raise ValueError("the draft names no target; add --target with the model it was trained for")
    target = read_target(name)
    if config.layout == "target":
        check_output_folder(config.output, kind, {"target": [name]}, overwrite=config.overwrite)
        stitch(config, path, target)
        return
    draft = read_draft(form, path, target, Choices.of(config))
    check_fields(from_speculators(values), form)
    check_fields(draft.values, form)
    converted = form.layouts[config.layout](draft, target)
    run_info = provenance(config, target.name)
    if (path / "run.json").exists():
        run_info["run"] = read_json(path / "run.json")
    with atomic_folder(Path(config.output), CHECKPOINT.check) as folder:
        write_checkpoint(folder, converted.values, converted.tensors, run_info)
    print(f"{config.output}: layout {config.layout}")
    if form.network is DFlash:
        print(f"  {convention_of(from_speculators(values), config.sample_from_anchor)}")
    tensors = changes(draft.tensors if is_adapter(path) else read_draft_tensors(path), converted.tensors)
    show_table({"tensors": tensors, "fields": changes(values, converted.values)})
    if max(converted.layers, default=0) >= target.config.num_layers - 1:
        print("  note: it reads the last layer's output, which other servers take after the final norm or not at all")


def convert_target(config: ConvertConfig) -> None:
    """Writes the MTP head of a target as a draft."""
    if config.layout != "slipstream":
        raise ValueError(
            f"input {config.input} is a target, whose MTP head only layout slipstream holds; set --layout slipstream"
        )
    extract(config, read_target(config.input))


def changes(before: Iterable[str], after: Iterable[str]) -> str:
    old = set(before)
    new = set(after)
    return f"{len(new)}: {len(old & new)} of the {len(old)} that were read, {len(new - old)} under new names"


def form_of(values: Values, config: ConvertConfig) -> Form:
    drafter = drafter_of(values, config.input)
    if drafter not in FORMS:
        raise ValueError(f"input {config.input} is a draft of the kind {drafter}; convert knows {', '.join(FORMS)}")
    form = FORMS[drafter]
    if config.layout not in form.layouts:
        raise ValueError(
            f"layout {config.layout} cannot hold drafts such as {config.input}; use {', '.join(form.layouts)}"
        )
    return form


def check_fields(values: Values, form: Form) -> None:
    """Raises ValueError for fields of a public config.json that no layout has a place for: what they say would be lost,
    or stand where no reader looks. Those that are off, null or empty say nothing."""
    nested = [values.get(name) or {} for name in ("eagle_config", "dflash_config")]
    present = {name: value for fields in (values, *nested) for name, value in fields.items() if value not in OFF}
    unknown = sorted(present.keys() - {*FIELDS, *form.fields})
    if unknown:
        raise ValueError(
            f"the draft's config.json has {', '.join(unknown)}, which no layout here has a place for; take out what "
            "its network does not depend on"
        )


def read_target(name: str) -> Source:
    path = resolve(name)
    config = load_config(path)
    tensors = decoder_tensors(read_tensors(path))
    if config.tie_word_embeddings:
        drop_tied_head(tensors, path)
    keys = {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if config.tie_word_embeddings else HEAD}
    missing = sorted(set(keys.values()) - tensors.keys())
    if missing:
        raise ValueError(f"target {name} lacks {', '.join(missing)} in its *.safetensors files")
    shared = {part: tensors[key] for part, key in keys.items()}
    return Source(name, path, config, shared)


def read_draft(form: Form, path: Path, target: Source, choices: Choices) -> Draft:
    """In the public layout, with the file's dtypes; names its target."""
    module: Any = load_draft(form.network, path, target.config, None, CPU, target.shared, choices)
    values = module.config.to_json()
    tensors = public_tensors(module)
    dtype = str(dtype_of(tensors)).removeprefix("torch.")
    values |= {"torch_dtype": dtype, "target": values["target"] or target.name}
    layers = module.config.aux_layers if module.layers_field else ()
    return Draft(values, tensors, layers, draft_values(module.config))


def dtype_of(tensors: Tensors) -> torch.dtype:
    return next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())


def as_it_is(draft: Draft, _target: Source) -> Draft:
    return draft


def block_to_sglang(draft: Draft, _target: Source) -> Draft:
    """z-lab's files of DFLASH and DFlash 2, SpecForge's of DSpark, NVIDIA's of LiLiCorr; ours beside their fields."""
    checked_for_sglang(draft, _target)
    fields = draft.values["dflash_config"]
    heads = heads_of(fields)
    if "markov_rank" not in heads:
        return draft
    nested = {**fields, "projector_type": "dspark", "attention_mode": "gqa"}
    nested.setdefault("confidence_head_with_markov", "confidence_head" in heads)
    return draft._replace(values={**draft.values, "architectures": ["DSparkDraftModel"], "dflash_config": nested})


def checked_for_sglang(draft: Draft, _target: Source) -> Draft:
    """Raises ValueError for a draft that SGLang does not load."""
    drafter = draft.values["drafter"]
    for rule in broken_rules("sglang", drafter, draft.options):
        raise ValueError(
            f"{rule.option} is {shown(draft.options[rule.option])} in this draft, but {SERVERS['sglang']} "
            f"{rule.reason}: use layout slipstream or another server's"
        )
    return draft


def heads_of(values: Values) -> set[str]:
    """The parts of a block draft besides its layers, by the fields of its dflash_config, as options name them."""
    fields = {"conv": "conv_kernel_size"} | {kind.option: kind.field for kind in CONFIGS}
    return {part for part, field in fields.items() if values.get(field)}


def check_markov_draft(draft: Draft, maker: str) -> set[str]:
    """Returns the heads of a draft in `maker`'s layout. Raises ValueError for parts that it does not have."""
    fields = draft.values["dflash_config"]
    heads = heads_of(fields)
    parts = heads | {"tap_norms", "context_norms", "output_gate"} & fields.keys()
    if odd := sorted(parts - {"markov_rank", "confidence_head"}):
        raise ValueError(f"{maker}'s layout has no draft with {', '.join(odd)}: use sglang, slipstream or another")
    if draft.values.get("draft_vocab_size"):
        raise ValueError(
            f"this draft has a vocabulary of its own (draft_vocab_size); {maker}'s drafts have the target's"
        )
    return heads


def block_to_deepspec(draft: Draft, target: Source) -> Draft:
    """DeepSpec's files: all fields at the top, and copies of the target's embedding and head."""
    fields = dict(draft.values["dflash_config"])
    heads = check_markov_draft(draft, "DeepSpec")
    if not draft.values["sample_from_anchor"]:
        raise ValueError("this draft does not predict at the anchor (sample_from_anchor); DeepSpec's drafts all do")
    flat = {
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": "markov_rank" in heads,
        **fields,
    }
    values = {name: value for name, value in draft.values.items() if name != "dflash_config"}
    values |= {**flat, "architectures": ["Qwen3DSparkModel"]}
    return draft._replace(values=values, tensors={**copied(target.shared, draft), **draft.tensors})


def block_to_modelopt(draft: Draft, _target: Source) -> Draft:
    """ModelOpt's files: heads' tensors without a prefix, and shift_label for the convention."""
    fields = draft.values["dflash_config"]
    heads = check_markov_draft(draft, "ModelOpt")
    is_causal = draft.values["use_sliding_window"] and not draft.values["sliding_window_non_causal"]
    if is_causal and "full_attention" in draft.values["layer_types"]:
        raise ValueError(
            "slots of this draft see later ones of their block in some layers alone (layer_types), and ModelOpt's in "
            "all or in none: use another layout"
        )
    nested = {name: value for name, value in fields.items() if name != "enable_confidence_head"}
    nested |= {
        "projector_type": "dspark" if heads else "dflash",
        "causal": is_causal,
        "shift_label": draft.values["sample_from_anchor"],
        "use_confidence_head": "confidence_head" in heads,
    }
    names = {prefix: name for name, prefix in MODELOPT_NAMES.items()}
    tensors = {_renamed(key, names): tensor for key, tensor in draft.tensors.items()}
    values = {**draft.values, "architectures": ["DFlashDraftModel"], "dflash_config": nested}
    return draft._replace(values=values, tensors=tensors)


def copied(shared: Tensors, draft: Draft) -> dict[str, Tensor]:
    """Returns copies of the target's tensors in the draft's dtype: files hold each by itself, also where the target has
    one for both."""
    dtype = dtype_of(draft.tensors)
    return {key: tensor.to(dtype, copy=True) for key, tensor in shared.items()}


def _renamed(key: str, beginnings: Mapping[str, str]) -> str:
    begin = next((begin for begin in beginnings if key.startswith(begin)), None)
    return key if begin is None else beginnings[begin] + key.removeprefix(begin)


def block_to_speculators(draft: Draft, target: Source) -> Draft:
    """With copies of the target's embedding and head; the head has the rows of the draft's vocabulary."""
    shared = dict(target.shared)
    if "t2d" in draft.tensors:
        shared[HEAD] = shared[HEAD][draft.tensors["t2d"]]
    return _speculators_draft(draft, draft.tensors, shared, target)


def eagle_to_sglang(draft: Draft, target: Source) -> Draft:
    """With a bias of zeros where fc has none, since SGLang's always has one."""
    weight = draft.tensors["fc.weight"]
    tensors = {"fc.bias": torch.zeros(len(weight), dtype=weight.dtype), **draft.tensors}
    values = {name: value for name, value in draft.values.items() if name != "bias"}
    return checked_for_sglang(Draft(values, tensors, draft.layers, {**draft.options, "bias": True}), target)


def eagle3_to_speculators(draft: Draft, target: Source) -> Draft:
    """With its own embedding or a copy of the target's; without a token map if it drafts the whole vocabulary."""
    if target.config.num_layers in draft.layers:
        raise ValueError(
            f"this draft reads state {target.config.num_layers}, after the target's final norm; speculators and vLLM "
            "only have the layers' outputs"
        )
    is_reduced = draft.values["draft_vocab_size"] < draft.values["vocab_size"]
    tensors = {layer_name(key): x for key, x in draft.tensors.items() if is_reduced or key not in ("d2t", "t2d")}
    return _speculators_draft(draft, tensors, {EMBEDDING: target.shared[EMBEDDING]}, target)


def _speculators_draft(draft: Draft, tensors: Tensors, shared: Tensors, target: Source) -> Draft:
    architectures = read_json(target.path / "config.json").get("architectures") or []
    values = to_speculators(draft.values, draft.values["target"], architectures)
    return draft._replace(values=values, tensors={**copied(shared, draft), **tensors})


FORMS = {
    "dflash": Form(
        DFlash,
        {
            "sglang": block_to_sglang,
            "speculators": block_to_speculators,
            "deepspec": block_to_deepspec,
            "modelopt": block_to_modelopt,
            "slipstream": as_it_is,
        },
        BLOCK_FIELDS,
    ),
    "eagle3": Form(
        Eagle3,
        {"sglang": checked_for_sglang, "speculators": eagle3_to_speculators, "slipstream": as_it_is},
        (
            AUX_LAYERS,
            "use_aux_hidden_state",
            "num_aux_hidden_states",
            POST_NORM,
            *EAGLE3_FLAGS,
            *LAYOUTS["modelopt_fields"],
        ),
    ),
    "eagle": Form(Eagle, {"sglang": eagle_to_sglang, "slipstream": as_it_is}, ("bias", "qkv_bias")),
    "mtp": Form(MTP, {"target": as_it_is}, ("mtp_form",)),  # convert_mtp.py
}


main = partial(run, convert, ConvertConfig, "slipstream convert")

if __name__ == "__main__":
    main()
