"""What a capture of features will be: the documents, the states to keep, the shards."""

from pathlib import Path

from datasets import Dataset, load_from_disk

from slipstream.data_tools.capture_options import CaptureConfig
from slipstream.data_tools.dataset import read_report
from slipstream.data_tools.feature_plan import measure, plan_shards
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.models.checkpoint import resolve, weights_fingerprint
from slipstream.models.config import check_feature_layers, default_feature_layers
from slipstream.models.dflash import default_block_feature_layers
from slipstream.models.feature_store import INDEX, FeatureFormat, FeatureIndex
from slipstream.models.pretrained import read_config

BLOCK_DRAFT_LAYERS = 5  # train/dflash.py's default, which decides the states that it reads


def load_splits(config: CaptureConfig) -> dict[str, Dataset]:
    read_report(Path(config.data))
    dataset = load_from_disk(config.data)
    limits = {"train": config.train_documents, "heldout": config.heldout_documents}
    return {
        name: dataset[name].select(range(len(dataset[name]) if limit is None else min(limit, len(dataset[name]))))
        for name, limit in limits.items()
    }


def build_index(config: CaptureConfig, splits: dict[str, Dataset]) -> FeatureIndex:
    """Raises ValueError where the data were prepared for another tokenizer than the target's."""
    path = resolve(config.target, config.revision, trust_remote_code=config.trust_remote_code)
    report = read_report(Path(config.data))
    options = ConversationOptions(target=str(path), trust_remote_code=config.trust_remote_code)
    tokenizer_hash = load_target_tokenizer(options).hash
    if report["tokenizer_hash"] != tokenizer_hash:
        raise ValueError(
            f"data {config.data} was prepared with another tokenizer (hash {report['tokenizer_hash'][:12]}, the "
            f"target's is {tokenizer_hash[:12]}); prepare it again with --target set to this target"
        )
    form = choose_format(config, path)
    needs = {name: measure(split, config.max_length) for name, split in splits.items()}
    return FeatureIndex(
        target_fingerprint=weights_fingerprint(path),
        tokenizer_hash=tokenizer_hash,
        data_hash=report["data_hash"],
        max_length=config.max_length,
        form=form,
        shards=plan_shards(needs, form, int(config.shard_gb * 1e9)),
        command=config.command(),
    )


def choose_format(config: CaptureConfig, path: Path) -> FeatureFormat:
    text = read_config(path, config.trust_remote_code).get_text_config()
    num_layers = text.num_hidden_layers
    defaults = {
        "eagle": lambda: (num_layers,),
        "eagle3": lambda: default_feature_layers(num_layers),
        "dflash": lambda: default_block_feature_layers(num_layers, BLOCK_DRAFT_LAYERS),
    }
    layers = config.layers or tuple(sorted({layer for name in config.drafters for layer in defaults[name]()}))
    check_feature_layers(layers, num_layers)
    last_hidden = (config.last_hidden or "eagle3" in config.drafters) and num_layers not in layers
    return FeatureFormat(
        layers=layers,
        num_layers=num_layers,
        hidden_size=text.hidden_size,
        dtype=config.dtype,
        last_hidden=last_hidden,
    )


def check_output(output: Path, index: FeatureIndex) -> None:
    """Raises ValueError where `output` holds a capture of something else, or shards of who knows what."""
    if not (output / INDEX).exists():
        foreign = sorted(path.name for path in output.glob("shard-*.safetensors"))
        if foreign:
            raise ValueError(f"output {output} holds {foreign[0]} and no {INDEX} that tells of it; name another folder")
        return
    there, here = FeatureIndex.read(output).to_json(), index.to_json()
    different = [name for name in here if name != "command" and there[name] != here[name]]
    if different:
        raise ValueError(
            f"output {output} holds features with another {', '.join(different)}; give the options they were captured "
            f"with ({there['command']}), or name another folder"
        )
