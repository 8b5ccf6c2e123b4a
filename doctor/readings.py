"""Other readings of a draft's files: the mistakes that trainers and servers are known to make.

A reading changes the files in memory, in one way. Where the draft is accepted better then, that way was meant, and the
reading names the cause and the remedy. They are listed in the order in which a draft's input passes through it, so that
the first stage that differs is named first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.doctor.replay import Subject
from slipstream.models.drafts.base import EMBEDDING, HEAD, DraftNetwork, ids_of
from slipstream.models.drafts.block_layouts import ANCHOR_FIELDS, CAUSAL_FIELDS
from slipstream.models.drafts.eagle3 import FLAG_TENSORS
from slipstream.models.targets.config import default_aux_layers
from slipstream.models.targets.decoder import Target

STAGES = (
    "files",
    "prompt text",
    "target's states",
    "fc and norms",
    "mask token",
    "block convention",
    "rotary embedding",
    "windows",
    "positions",
    "draft vocabulary",
    "head and embedding",
    "later steps",
    "text",
)
SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales")
SIMILAR = 0.6  # cosine between rows of a draft's head and of the target's, above which they stand for one token
CHUNK = 1024  # rows compared at once


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to mean the files."""

    stage: str
    name: str  # "taps one layer later"
    cause: str  # the fault, if this reading is right
    remedy: str
    subject: Subject


class Case(NamedTuple):
    """A draft as it was read, and its target."""

    subject: Subject
    network: DraftNetwork
    target: Target


def readings(case: Case) -> Iterator[Reading]:
    """Other readings of a draft that could be read."""
    for make in (taps, norms, mask_tokens, conventions, ropes, windows, vocabularies, heads):
        yield from make(case)


def taps(case: Case) -> Iterator[Reading]:
    """The target's states that fc reads, counted otherwise."""
    config: Any = case.network.config
    if case.subject.family in ("eagle", "mtp") or not getattr(config, "has_fc", True):
        return
    named_layers = tuple(config.aux_layers)
    last = case.target.config.num_layers
    alternatives = {
        "one layer earlier": tuple(layer - 1 for layer in named_layers),
        "one layer later": tuple(layer + 1 for layer in named_layers),
        "the default ones": default_aux_layers(last) if len(named_layers) == 3 else named_layers,
        "the last one before the final norm": tuple(last - 1 if layer == last else layer for layer in named_layers),
        "the last one after the final norm": tuple(last if layer == last - 1 else layer for layer in named_layers),
        "in the opposite order": named_layers[::-1],
    }
    for name, layers in alternatives.items():
        if layers == named_layers or not are_layers(layers, last):
            continue
        why = ", as where one side counts layers' inputs and the other their outputs" if "one layer" in name else ""
        yield Reading(
            "target's states",
            f"states {name}: {list(layers)}",
            f"config.json names the target's states {list(named_layers)} (layer outputs), but the draft was trained on "
            f"{list(layers)}{why}",
            f"write {list(layers)} as layer outputs: {layers_field(case.subject, layers)}",
            with_layers(case.subject, layers),
        )


def are_layers(layers: tuple[int, ...], last: int) -> bool:
    """Whether these are distinct layer outputs of a target whose final state is `last`."""
    return min(layers) >= 0 and max(layers) <= last and len(set(layers)) == len(layers)


def with_layers(subject: Subject, layers: tuple[int, ...]) -> Subject:
    """The files with these layer outputs in every place that names them."""
    values = subject.files.values
    if subject.family == "dflash":
        if "target_layer_ids" in values:
            return subject.with_values(target_layer_ids=list(layers))
        if "aux_hidden_state_layer_ids" in values:
            return subject.with_values(aux_hidden_state_layer_ids=[layer + 1 for layer in layers])
        return subject.with_values(dflash_config={**subject.section("dflash_config"), "target_layer_ids": list(layers)})
    eagle = {name: x for name, x in subject.section("eagle_config").items() if "layer_ids" not in name}
    inputs = [layer + 1 for layer in layers]
    return subject.with_choices(aux_layers=None).with_values(
        eagle_config=eagle, eagle_aux_hidden_state_layer_ids=inputs
    )


def layers_field(subject: Subject, layers: tuple[int, ...]) -> str:
    if subject.family == "dflash":
        return f"dflash_config.target_layer_ids {list(layers)} in config.json"
    return f"eagle_aux_hidden_state_layer_ids {[layer + 1 for layer in layers]} (layer inputs) in config.json"


def norms(case: Case) -> Iterator[Reading]:
    """Flags of EAGLE-3.1, each the other way."""
    if case.subject.family != "eagle3":
        return
    config: Any = case.network.config
    for flag, stage in (("norm_before_residual", "fc and norms"), ("norm_output", "later steps")):
        value = not getattr(config, flag)
        trained = {
            "norm_before_residual": ("adds to the state", "adds to the normed state"),
            "norm_output": ("reads the state before the final norm", "reads the state after the final norm"),
        }[flag][value]
        who = "the layer" if flag == "norm_before_residual" else "the next step"
        yield Reading(
            stage,
            f"{flag} {str(value).lower()}",
            f"config.json says {flag} {str(not value).lower()}, or leaves it out, but in the draft's training {who} "
            f"{trained}",
            f"write {flag} {str(value).lower()} at the top level of config.json",
            without_flag(case.subject, flag).with_values(**{flag: value}),
        )


def without_flag(subject: Subject, flag: str) -> Subject:
    if "eagle_config" in subject.files.values:
        subject = subject.with_values(eagle_config=subject.section("eagle_config", flag))
    return subject.with_choices(norm_output=None) if flag == "norm_output" else subject


def mask_tokens(case: Case) -> Iterator[Reading]:
    if case.subject.family == "dflash":
        config: Any = case.network.config
        yield from other_masks(case.subject, case.target, config.mask_token_id)


def other_masks(subject: Subject, target: Target, mask_token: int | None) -> Iterator[Reading]:
    """Tokens that may stand for slots to fill, but for `mask_token`, which config.json names; None: it names none."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return
    tokens = {name: getattr(tokenizer, f"{name}_token_id") for name in ("mask", "pad", "eos", "unk", "bos")}
    tokens["first unused"] = max(tokenizer.get_vocab().values()) + 1
    statement = "names no mask token" if mask_token is None else f"names token {mask_token} as the mask token"
    for name, token in tokens.items():
        if token is None or token == mask_token or token >= target.config.vocab_size:
            continue
        inner = {**subject.section("dflash_config"), "mask_token_id": token}
        yield Reading(
            "mask token",
            f"the {name} token as the mask token",
            f"config.json {statement}, but the draft was trained with {token}, the tokenizer's {name} token",
            f"write dflash_config.mask_token_id {token} in config.json",
            subject.with_values(dflash_config=inner, mask_token_id=None),
        )


def conventions(case: Case) -> Iterator[Reading]:
    """Whether slot 0 of a block, the anchor's, drafts a token, too."""
    if case.subject.family != "dflash":
        return
    config: Any = case.network.config
    yield convention(case.subject, from_anchor=not config.sample_from_anchor)


def convention(subject: Subject, *, from_anchor: bool) -> Reading:
    """The files in this convention, whatever their fields and the options say of it."""
    value = str(from_anchor).lower()
    fields = anchor_fields(subject)
    option_value = subject.choices.sample_from_anchor
    statement = "config.json does not say whether it drafts"
    option = f" (serve: --drafter.sample-from-anchor {value})"
    if fields:  # the option must not contradict them
        statement = f"config.json has {', '.join(fields)}"
        option = ""
    elif option_value is not None:
        statement = f"the option sample_from_anchor is {str(option_value).lower()}"
    other_fields = [field for field in fields if not field.startswith("sample_from_anchor")]
    instead = f" instead of {', '.join(other_fields)}" if other_fields else ""
    meaning = "the next token" if from_anchor else "nothing"
    inner = subject.section("dflash_config", *ANCHOR_FIELDS)
    changed = {**dict.fromkeys(ANCHOR_FIELDS), "sample_from_anchor": from_anchor}
    return Reading(
        "block convention",
        f"sample_from_anchor {value}",
        f"the draft was trained so that the anchor's slot drafts {meaning}; {statement}",
        f"write sample_from_anchor {value}{instead} in config.json{option}",
        subject.with_values(**changed, dflash_config=inner).with_choices(sample_from_anchor=None),
    )


def anchor_fields(subject: Subject) -> list[str]:
    """The fields by which config.json says whether the anchor's slot drafts, with their values."""
    levels = subject.files.values, subject.section("dflash_config")
    settings = {name: fields[name] for fields in levels for name in ANCHOR_FIELDS if fields.get(name) is not None}
    return [f"{name} {str(bool(value)).lower()}" for name, value in settings.items()]


def ropes(case: Case) -> Iterator[Reading]:
    config: Any = case.network.config
    if config.rope != case.target.config.rope.of_draft and not config.rotates_as_target:
        fields = case.target.config.rope.of_draft.to_json()
        yield Reading(
            "rotary embedding",
            "the target's rotary embedding",
            f"the draft's rotary embedding (theta {config.rope.theta:g}, {config.rope.rope_type}) is not its target's "
            f"(theta {fields['rope_theta']:g}, {case.target.config.rope.rope_type}), which it was trained with",
            f"copy the target's rope_theta and rope_scaling to the draft's config.json: {fields}",
            case.subject.with_values(**fields, rope_parameters=None),
        )
    turned = interleaved(case.subject, case.network)
    if turned is not None:
        yield Reading(
            "rotary embedding",
            "interleaved rotary embedding",
            "the draft's weights are for a rotary embedding that pairs neighbouring dims (interleaved); servers pair "
            "dims half a head apart (neox)",
            "reorder the rows of q_proj and k_proj in the draft's files: of each head the even rows first, then the "
            "odd ones",
            turned,
        )


def interleaved(subject: Subject, network: DraftNetwork) -> Subject | None:
    """The files with the rows of q_proj and k_proj reordered so that neighbouring dims are paired; None without such
    tensors."""
    size = network.config.head_dim
    order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
    changed: dict[str, Tensor | None] = {}
    for name, tensor in subject.files.tensors.items():
        kind = name.rsplit(".", 2)[-2] if name.count(".") > 1 else ""
        if kind in ("q_proj", "k_proj"):
            changed[name] = tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        elif kind in ("q_norm", "k_norm") and tensor.shape == (size,):
            changed[name] = tensor[order]
    return subject.with_tensors(**changed) if changed else None


def windows(case: Case) -> Iterator[Reading]:
    config: Any = case.network.config
    subject = case.subject
    values = case.subject.files.values
    window = values.get("sliding_window")
    layers = values.get("num_hidden_layers") or 1
    if config.sliding_window is not None:
        yield Reading(
            "windows",
            "no window",
            f"config.json gives layers a window of {config.sliding_window} positions, but the draft was trained with "
            "full attention",
            "write layer_types with full_attention alone and use_sliding_window false in config.json",
            subject.with_values(layer_types=["full_attention"] * layers, use_sliding_window=False),
        )
        if subject.family == "dflash":
            yield other_window_mask(subject, causal=config.sliding_window_non_causal)
    elif window:
        yield Reading(
            "windows",
            f"a window of {window}",
            f"config.json has sliding_window {window}, but layer_types or use_sliding_window turn it off; the draft "
            "was trained with it",
            "write layer_types with sliding_attention and use_sliding_window true in config.json",
            subject.with_values(layer_types=["sliding_attention"] * layers, use_sliding_window=True),
        )


def other_window_mask(subject: Subject, *, causal: bool) -> Reading:
    """The files with windows whose slots see later slots of their block, or with `causal` do not."""
    inner = subject.section("dflash_config", *CAUSAL_FIELDS, "sliding_window_non_causal")
    value = str(not causal).lower()
    return Reading(
        "windows",
        f"sliding_window_non_causal {value}",
        f"in layers with a window the draft is read as if slots {'saw' if causal else 'did not see'} later slots of "
        f"their block, but it was trained the other way round",
        f"write sliding_window_non_causal {value} and is_causal {str(causal).lower()} in config.json",
        subject.with_values(dflash_config=inner, **dict.fromkeys(CAUSAL_FIELDS), sliding_window_non_causal=not causal),
    )


def vocabularies(case: Case) -> Iterator[Reading]:
    """Other meanings of the draft's ids."""
    if case.network.target_ids is not None:
        yield from other_maps(case.subject, case.target, case.network.target_ids.cpu())


def other_maps(subject: Subject, target: Target, target_ids: Tensor | None) -> Iterator[Reading]:
    """Other maps d2t than as `target_ids` (Vd,); None: it could not be read."""
    tensors = subject.files.tensors
    size = target.config.vocab_size
    d2t, t2d, head = (subject.tensor(name) for name in ("d2t", "t2d", HEAD))
    maps: dict[str, Tensor | None] = {}
    if d2t is not None:
        maps["target ids, not differences, in d2t"] = d2t.long()
    num_rows = len(d2t) if d2t is not None else len(head) if head is not None else 0
    if t2d is not None and t2d.dtype == torch.bool and int(t2d.sum()) == num_rows:
        maps["the ids that t2d lists"] = t2d.nonzero().flatten()
    if head is not None and len(head) == num_rows and num_rows < size:
        maps["the ids whose rows of the target's head are most alike"] = most_alike(head, target.shared[HEAD])
    name = next((key for key in tensors if key.rpartition(".")[2] == "d2t"), "d2t")
    for meaning, ids in maps.items():
        if ids is None or len(ids.unique()) < len(ids) or ids.min() < 0 or ids.max() >= size:
            continue
        if target_ids is not None and torch.equal(ids, target_ids):
            continue
        fault = "is not the one it was trained with" if d2t is not None else "is missing from its files"
        yield Reading(
            "draft vocabulary",
            meaning,
            f"the map d2t from the draft's ids to the target's {fault}; the right one has {meaning}",
            "take d2t and t2d from the checkpoint of the training (a map that was made again differs silently), or "
            f"write d2t from {meaning}",
            subject.with_values(draft_vocab_size=num_rows).with_tensors(
                **{name: ids - torch.arange(len(ids))},
                **dict.fromkeys(subject.names("t2d")),  # made from d2t again
            ),
        )


def most_alike(head: Tensor, target_head: Tensor) -> Tensor | None:
    """(Vd,) ids of the target's rows with the highest cosine to each row; None where they are not alike, or as wide."""
    if head.shape[1] != target_head.shape[1]:
        return None
    rows = torch.nn.functional.normalize(target_head.float(), dim=1)
    best = []
    ids = []
    for part in head.to(rows.device).float().split(CHUNK):
        cosine, index = (torch.nn.functional.normalize(part, dim=1) @ rows.t()).max(dim=1)
        best.append(cosine)
        ids.append(index)
    return torch.cat(ids).cpu() if float(torch.cat(best).mean()) > SIMILAR else None


def heads(case: Case) -> Iterator[Reading]:
    subject = case.subject
    shared = case.target.shared
    target_ids = case.network.target_ids
    if subject.family == "eagle3" and subject.names(HEAD):
        rows = shared[HEAD] if target_ids is None else shared[HEAD][target_ids.to(shared[HEAD].device)]
        yield Reading(
            "head and embedding",
            "the target's head",
            "lm_head of the draft's files is not the head that it was trained with: the target's does better",
            "write the target's rows of the draft vocabulary as lm_head.weight",
            subject.with_tensors(**dict.fromkeys(subject.names(HEAD), rows)),
        )
    if subject.names(EMBEDDING) and case.network.embed_tokens is not None:
        yield Reading(
            "head and embedding",
            "the target's embedding",
            "embed_tokens of the draft's files is not the embedding that it was trained with: the target's does better",
            "delete embed_tokens.weight from the draft's files",
            subject.with_tensors(**dict.fromkeys(subject.names(EMBEDDING))),
        )


def repairs(subject: Subject, target: Target, path: Path, is_refused: bool) -> Iterator[Reading]:
    """Readings of files that are refused as they are, or hold what readers leave out."""
    yield from quantised(subject)
    yield from other_families(subject)
    if is_refused:
        yield from left_open(subject, target)
        yield from other_maps(subject, target, None)
        yield from other_heads(subject, target)
    mask = path / "mask_embedding.pt"
    if subject.family == "dflash" and mask.exists():
        loaded = torch.load(mask, map_location="cpu", weights_only=True)
        vector = next(iter(loaded.values())) if isinstance(loaded, dict) else loaded
        yield Reading(
            "mask token",
            "the file's own mask embedding",
            f"{mask.name} holds an embedding of the mask token that the draft was trained with; readers of config.json "
            "and safetensors leave it out, and take the target's embedding of the mask token",
            "serve it with a server that reads the file, or train the draft again with a token of the target as mask",
            replace(subject, mask_embedding=vector.flatten().float()),
        )
    if subject.family == "eagle3":
        yield from flags_of_tensors(subject)


def flags_of_tensors(subject: Subject) -> Iterator[Reading]:
    """Flags that contradict the norms in the files."""
    levels = subject.files.values, subject.section("eagle_config")
    for flag, tensor in FLAG_TENSORS.items():
        settings = [fields[flag] for fields in levels if fields.get(flag) is not None]
        has = subject.tensor(tensor) is not None
        if not settings or all(bool(setting) == has for setting in settings):
            continue
        yield Reading(
            "fc and norms",
            f"{flag} {str(has).lower()}",
            f"config.json says {flag} {str(any(settings)).lower()}, but the files have "
            f"{f'{tensor}, which servers then leave unused' if has else f'no {tensor}'}",
            f"write {flag} true at the top level of config.json"
            if has
            else f"delete {flag} from config.json, or take {tensor} from the checkpoint of the training",
            without_flag(subject, flag).with_values(**{flag: True if has else None}),
        )


def other_heads(subject: Subject, target: Target) -> Iterator[Reading]:
    """A head that is missing, or that a draft which shares its target's must not have; the same of embeddings."""
    head = subject.tensor(HEAD)
    d2t = subject.tensor("d2t")
    if subject.family == "eagle3" and head is None:
        rows = target.shared[HEAD]
        rows_of_draft = rows if d2t is None else rows[ids_of(d2t.long()).clamp(0, len(rows) - 1).to(rows.device)]
        yield Reading(
            "head and embedding",
            "the target's head",
            "the files have no lm_head.weight, so that servers guess whose head is meant; it is the target's"
            + ("" if d2t is None else ", of which d2t names the rows"),
            "write the target's rows of the draft vocabulary as lm_head.weight",
            subject.with_tensors(**{HEAD: rows_of_draft}),
        )
    for name in (HEAD, EMBEDDING):
        tensors = subject.names(name)
        if tensors and subject.family != "eagle3":
            yield Reading(
                "head and embedding",
                f"without {name}",
                f"the files have a {name} that is not the target's, but the draft was trained with the target's",
                f"delete {name} from the draft's files",
                subject.with_tensors(**dict.fromkeys(tensors)),
            )


def quantised(subject: Subject) -> Iterator[Reading]:
    """Weights of 8 bits times their scales, and settings of a target's quantisation that a draft has inherited."""
    values = subject.files.values
    tensors = subject.files.tensors
    changed: dict[str, Tensor | None] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("weight")
        scale = next((f"{stem}{suffix}" for suffix in SCALES if f"{stem}{suffix}" in tensors), None)
        if name.endswith(".weight") and scale is not None:
            changed[name] = scaled(tensor, tensors[scale])
            changed[scale] = None
    has_settings = "quantization_config" in values
    if changed:
        yield Reading(
            "files",
            "quantised weights times their scales",
            f"{len(changed) // 2} weights of the draft are quantised, which readers that take them as they are lose "
            "every accepted token by",
            "dequantise the draft (weight * scale, in bf16) and delete quantization_config from its config.json",
            subject.with_tensors(**changed).with_values(quantization_config=None),
        )
    elif has_settings:
        yield Reading(
            "files",
            "16-bit weights without quantization_config",
            "config.json has a quantization_config, the target's, but the draft's weights are of 16 bits: servers that "
            "follow it read them as codes",
            "delete quantization_config from the draft's config.json",
            subject.with_values(quantization_config=None),
        )


def scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """codes (O, I) times scales: one, (O,) or (O, 1), or of blocks (o, i)."""
    scale = scale.float()
    if scale.numel() == 1:
        scale = scale.reshape(())
    elif codes.dim() > 1 and (scale.dim() == 1 or scale.shape[1] == 1):
        scale = scale.reshape(-1, 1)
    elif codes.dim() > 1:
        rows = -(-codes.shape[0] // scale.shape[0])
        columns = -(-codes.shape[1] // scale.shape[1])
        scale = scale.repeat_interleave(rows, 0)[: codes.shape[0]].repeat_interleave(columns, 1)[:, : codes.shape[1]]
    return (codes.float() * scale).bfloat16()


def other_families(subject: Subject) -> Iterator[Reading]:
    """The architecture of config.json is another kind's: fc and its states are skipped, or looked for in vain."""
    tensors = subject.files.tensors
    looks = {
        "eagle3": any(
            name.removeprefix("model.").startswith(("midlayer.", "layers.0.hidden_norm")) for name in tensors
        ),
        "dflash": any(name.removeprefix("model.") == "hidden_norm.weight" for name in tensors),
    }
    for family, fits in looks.items():
        if fits and family != subject.family:
            yield Reading(
                "files",
                f"as {family.upper()}",
                f"config.json says that the draft is {subject.family.upper()}, but its tensors are those of "
                f"{family.upper()}: servers that follow it skip fc and the target's states",
                f"write the architecture of {family.upper()} in config.json (architectures, and drafter in our files)",
                replace(subject, family=family).with_values(drafter=family, speculators_model_type=None),
            )


def left_open(subject: Subject, target: Target) -> Iterator[Reading]:
    """Returns each meaning of what files leave open and loading therefore refuses."""
    values = subject.files.values
    last = target.config.num_layers
    if subject.family == "eagle3":
        layer_ids = subject.section("eagle_config").get("eagle_aux_hidden_state_layer_ids")
        counted = tuple(layer_ids or values.get("eagle_aux_hidden_state_layer_ids") or ())
        candidates = {
            (1, last // 2 - 1, last - 4): "EAGLE-3's",
            (2, last // 2, last - 3): "those that engines guess",
            tuple(default_aux_layers(last)): "ours",
            (0, last // 2, last - 1): "first, middle and last",
            **({counted: "as outputs", tuple(layer - 1 for layer in counted): "as inputs"} if counted else {}),
        }
        for layers, whose in candidates.items():
            if are_layers(layers, last) and list(layers) == sorted(layers):
                yield Reading(
                    "target's states",
                    f"states {list(layers)}",
                    "config.json leaves open which of the target's states fc reads; servers guess, and most guesses "
                    f"are wrong. Right are {list(layers)} (layer outputs; {whose})",
                    f"name them: {layers_field(subject, layers)}",
                    with_layers(subject, layers),
                )
        for value in (True, False):
            yield Reading(
                "later steps",
                f"norm_output {str(value).lower()}",
                "norm_output has two meanings by the date of the trainer, and the files do not say which is meant",
                f"write what servers mean by it: norm_output {str(value).lower()} (serve: --drafter.norm-output)",
                subject.with_choices(norm_output=value),
            )
    if subject.family == "dflash":
        yield from other_masks(subject, target, None)
        for value in (True, False):
            yield convention(subject, from_anchor=value)
