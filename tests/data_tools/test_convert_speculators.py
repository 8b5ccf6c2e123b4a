"""The library speculators as the oracle: EAGLE3 drafts that we wrote for it compute the same logits there, and its own
files the same logits here. Skipped where it is not installed: `pip install speculators`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.eagle3 import FLAGS, Eagle3
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import default_aux_layers
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import TransformersTarget
from slipstream.tests.data_tools.conversion import Runs, save_eagle3_draft
from slipstream.tests.random_targets import FIELDS, SHAPE, save_random_target
from slipstream.train.batches import collate
from slipstream.train.ttt import TTTAttention, find_rows

REASON = "the package speculators is not installed, whose network is the oracle here"
speculators = pytest.importorskip("speculators.models.eagle3", reason=REASON)
STEPS = 3
LENGTH = 24
CPU = torch.device("cpu")


DEFAULTS = ("norm_before_residual", "norm_before_fc", "norm_output")  # flags of their own recipe


@pytest.fixture(
    params=[
        *((12, None, 50, ()), (12, None, 120, DEFAULTS), (12, (0, 5, 10), 50, DEFAULTS), (6, (1, 5), 50, ())),
        *((12, None, 50, (flag,)) for flag in (*FLAGS, "qk_norm")),
        (6, (4, 1), 50, ("fc_norm", "norm_output")),
        *((6, (1, 3), 50, (*flags, "num_layers")) for flags in (("norm_output",), ("qk_norm",))),
    ],
    ids=str,
)
def runs(request, tmp_path, capsys) -> Runs:
    """A target and a draft that reads the default or these layers, with a vocabulary of that size, these flags and, if
    they name num_layers, three layers."""
    num_layers, layers, draft_vocab_size, flags = request.param
    shape = SHAPE | {"num_hidden_layers": num_layers}
    save_random_target(LlamaConfig(**shape, rope_parameters=FIELDS["llama3_rope"]), tmp_path / "target")
    round_to_bf16(tmp_path / "target" / "model.safetensors")
    runs = Runs(tmp_path / "target", tmp_path, capsys)
    fields = dict.fromkeys(flags, True) | ({"num_layers": 3} if "num_layers" in flags else {})
    save_eagle3_draft(runs, layers or default_aux_layers(num_layers), draft_vocab_size, **fields)
    return runs


def round_to_bf16(file: Path):
    """As real targets are, so that the copy of the embedding in a bf16 draft is exact."""
    save_file({key: x.bfloat16().float() for key, x in load_file(file).items()}, file, {"format": "pt"})


@pytest.fixture
def tokens() -> list[int]:
    return torch.randint(0, 120, (LENGTH + STEPS,), generator=torch.Generator().manual_seed(2)).tolist()


def load_theirs(folder: Path) -> Any:
    config = speculators.Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention, their default, is for GPUs
    return speculators.Eagle3DraftModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()


@torch.no_grad()
def their_logits(model: Any, target: Path, tokens: list[int]) -> list[Tensor]:
    """Per step of training-time test (LENGTH, Vd), of states picked by the ids of their config: inputs of layers."""
    verifier = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    inputs = {}
    layers = model.target_layer_ids
    states = verifier.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    inputs = dict(enumerate(states[: len(verifier.model.layers)]))  # the last one is after the final norm
    hook = verifier.model.layers[-1].register_forward_hook(
        lambda _m, _i, output: inputs.update({len(states) - 1: output})
    )
    verifier.model(torch.tensor([tokens]))
    hook.remove()
    aux_states = torch.cat([inputs[layer] for layer in layers], dim=-1)
    logits = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0]))
    ids = torch.tensor([tokens[1 : LENGTH + 1]])  # their rows hold the token after the state's
    model(aux_states[:, :LENGTH], ids, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    return logits


@torch.no_grad()
def our_logits(draft: Eagle3, target: Path, tokens: list[int]) -> list[Tensor]:
    frozen = TransformersTarget(
        AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), draft.config.aux_layers
    )
    document = (tokens[: LENGTH + 2], [False] + [True] * (LENGTH + 1))  # so that LENGTH rows ask
    batch = collate([[document]], LENGTH + 2)
    rows = find_rows(batch, STEPS)
    assert rows.asking.tolist() == list(range(LENGTH))
    aux_states = frozen.aux_states(batch.tokens, batch.positions)[0][0, :LENGTH]
    attention = TTTAttention(rows, RotaryEmbedding(draft.config.rope, draft.config.head_dim, 64))
    if draft.config.num_layers == 1:
        draft.write_context(torch.zeros(0, 32), torch.zeros(0, 32), attention)
    state = draft.fuse(aux_states)
    logits = []
    text = torch.tensor(tokens)
    for step in range(STEPS):
        state = draft(frozen.embed(text[torch.arange(LENGTH) + 1 + step]), state, attention)
        logits.append(draft.logits(state))
        attention.next_step()
    return logits


def assert_equal_logits(logits: list[Tensor], expected: list[Tensor]):
    """Compares the rows whose tokens both have: the expected ones are padded at the end."""
    assert len(logits) == len(expected) == STEPS
    for step in range(STEPS):
        torch.testing.assert_close(logits[step][: LENGTH - step], expected[step][: LENGTH - step], rtol=1e-4, atol=1e-4)


def test_a_draft_written_for_speculators_computes_the_same_there(runs, tokens):
    folder, _ = runs.convert(runs.root / "draft", "speculators")
    draft = load_draft(Eagle3, runs.root / "draft", load_config(runs.target), torch.float32, CPU)
    assert_equal_logits(our_logits(draft, runs.target, tokens), their_logits(load_theirs(folder), runs.target, tokens))


def test_a_draft_saved_by_speculators_computes_the_same_here(runs, tokens):
    folder, _ = runs.convert(runs.root / "draft", "speculators")
    model = load_theirs(folder)
    saved = runs.root / "saved"
    model.save_pretrained(str(saved))
    assert "drafter" in json.loads((saved / "config.json").read_text()), "it keeps fields that it does not know"
    for path in (saved, runs.convert(saved, "slipstream")[0]):
        draft = load_draft(Eagle3, path, load_config(runs.target), torch.float32, CPU)
        assert_equal_logits(our_logits(draft, runs.target, tokens), their_logits(model, runs.target, tokens))
