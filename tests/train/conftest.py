"""A tiny random target with a tokenizer, a token map and a prepared dataset of multi-turn documents, as files."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from slipstream.data_tools.capture_states import main as capture
from slipstream.models.drafts.base import DraftNetwork
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.token_map import TokenMap
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.frozen import FrozenTarget, TransformersTarget
from slipstream.tests.random_targets import FAMILIES, save_random_target
from slipstream.train.eagle3 import DraftOptions, Eagle3Training, main

DRAFT_VOCAB_SIZE = 40
AUX_STATE_LAYERS = (2, 0, 4)  # neither ascending nor the default: a swap shows
MAX_LENGTH = 40
SaveData = Callable[..., Path]
CaptureTo = Callable[..., Path]
Document = tuple[list[int], list[bool]]  # tokens, and which of them are supervised


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums in the same order here and in the processes that some tests start."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory) -> Path:
    return save_target("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory) -> Path:
    return save_target("gemma2-free-scores", tmp_path_factory.mktemp("gemma"))


def save_target(family: str, path: Path) -> Path:
    """With a tokenizer of numbers."""
    save_random_target(FAMILIES[family], path)
    words = {str(number): number for number in range(FAMILIES["qwen3"].vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target_model(target_path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target_path).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def token_map(target_model) -> TokenMap:
    """Every other token from 5 on, so that draft ids are far from target ids."""
    counts = torch.zeros(target_model.config.vocab_size, dtype=torch.int64)
    counts[5 : 5 + 2 * DRAFT_VOCAB_SIZE : 2] = 3
    return TokenMap.build(counts, DRAFT_VOCAB_SIZE, [], {})


def random_parts(
    network: type[DraftNetwork], target: PreTrainedModel, ids: torch.Tensor | None, **fields: Any
) -> tuple[Any, FrozenTarget, RotaryEmbedding]:
    """The arguments of a DraftTraining: a random draft, the target and rotary embeddings. `ids` are the draft's
    vocabulary, `fields` belong to its config."""
    torch.manual_seed(3)
    config = TargetSpec.from_json(AutoConfig.for_model(**target.config.to_dict()).to_dict())
    size = None if ids is None else len(ids)
    draft = network(network.Config.from_target(config, draft_vocab_size=size, **fields))
    if ids is not None:
        draft.set_vocabulary(ids)
    for parameter in draft.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    frozen = TransformersTarget(target, draft.config.aux_layers)
    return draft, frozen, RotaryEmbedding(draft.config.rope, draft.config.head_dim, 128)


def make_eagle3(target: PreTrainedModel, ids: torch.Tensor, **fields: Any) -> Eagle3Training:
    """A random draft in training: 4 steps, depth 3. `fields` of the config."""
    parts = random_parts(Eagle3, target, ids, aux_layers=AUX_STATE_LAYERS, **fields)
    training = Eagle3Training(*parts, DraftOptions(ttt_steps=4), depth=3)
    training.state_weight = 0.0
    return training


@pytest.fixture
def training(target_model, token_map) -> Eagle3Training:
    return make_eagle3(target_model, token_map.ids)


@pytest.fixture(
    params=[
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "qk_norm": True},
        {"fc_norm": True, "norm_output": True, "num_layers": 2},
    ],
    ids=" ".join,
)
def flagged_training(request, target_model, token_map) -> Eagle3Training:
    """With flags of EAGLE-3.1, norms of queries and keys, or two layers."""
    return make_eagle3(target_model, token_map.ids, **request.param)


def random_document(generator: torch.Generator, vocab_size: int = 120) -> Document:
    """One to three turns, each a prompt of 2 to 9 tokens and an answer of 1 to 9."""
    mask = []
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        prompt, answer = torch.randint(1, 10, (2,), generator=generator).tolist()
        mask += [False] * (prompt + 1) + [True] * answer
    return torch.randint(0, vocab_size, (len(mask),), generator=generator).tolist(), mask


def documents(seed: int) -> list[list[Document]]:
    """Two rows, of two documents and of one."""
    generator = torch.Generator().manual_seed(seed)
    return [[random_document(generator) for _ in range(count)] for count in (2, 1)]


def random_dataset(count: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    documents = [random_document(generator) for _ in range(count)]
    columns = {"input_ids": [ids for ids, _ in documents], "loss_mask": [m for _, m in documents]}
    return Dataset.from_dict(columns)


@pytest.fixture(scope="session")
def save_data(target_path, tmp_path_factory) -> SaveData:
    def save(train, heldout, **changes):
        path = tmp_path_factory.mktemp("data")
        splits = DatasetDict(train=train, heldout=heldout)
        splits.save_to_disk(path, num_shards=dict.fromkeys(splits, 1))  # an empty split is a file, too
        report = {
            "tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(target_path)),
            "data_hash": "0123",
            "split_rows": {"train": len(train), "heldout": len(heldout)},
        }
        (path / "report.json").write_text(json.dumps(report | changes))
        return path

    return save


@pytest.fixture(scope="session")
def data_path(save_data) -> Path:
    return save_data(random_dataset(60, seed=1), random_dataset(9, seed=2))


@pytest.fixture(scope="session")
def capture_to(target_path, data_path, tmp_path_factory) -> CaptureTo:
    """Captures to a new folder, in fp32 unless told; `changes` replace or add options."""

    def run(*words, **changes):
        output = tmp_path_factory.mktemp("features")
        options = {"target": target_path, "data": data_path, "max_length": MAX_LENGTH, "dtype": "fp32"}
        options |= {"batch_tokens": 100, "shard_gb": 6e-5, "output": output} | changes
        capture([f"--{name}={value}" for name, value in options.items()] + ["--yes", *words])
        return output

    return run


@pytest.fixture(scope="session")
def stores(capture_to) -> dict[str, Path]:
    """With the state after the final norm of supervised tokens, and of all."""
    return {"supervised": capture_to("--layers", "3", "2", "0"), "all": capture_to("--layers", "0", "2", "3", "4")}


@pytest.fixture(scope="session")
def vocabulary_path(token_map, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "map.safetensors"
    token_map.write(path)
    return path


@pytest.fixture(scope="session")
def run_flags(target_path, data_path, vocabulary_path) -> Callable[..., list[str]]:
    """Flags of a run of 6 steps in a second, for any program; `changes` replace or add options, __ for the dot."""
    standard = {
        "target": target_path,
        "data.path": data_path,
        "data.max_length": MAX_LENGTH,
        "data.long_documents": "cut",
        "data.batch_size": 2,
        "draft.vocabulary": vocabulary_path,
        "optim.steps": 6,
        "optim.name": "adamw",  # unlike Muon it does not enlarge differences by the order of sums
        "optim.lr": 1e-2,
        "evaluation.every": 3,
        "checkpoint.every": 2,
    }

    def build(output, **changes):
        options = standard | {name.replace("__", "."): value for name, value in changes.items()} | {"output": output}
        return [f"--{name}={value}" for name, value in options.items()]

    return build


@pytest.fixture(scope="session")
def arguments(run_flags) -> Callable[..., list[str]]:
    """`run_flags` for train/eagle3.py."""
    return partial(run_flags, draft__aux_layers="[2, 0, 4]", draft__ttt_steps=3)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, arguments) -> Path:
    """A run of train/eagle3.py that nothing disturbed. Tests that change it copy it."""
    output = tmp_path_factory.mktemp("finished")
    main(arguments(output))
    return output
