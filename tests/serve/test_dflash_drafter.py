"""The DFLASH drafter by itself: the KV that it stores, its options, and which checkpoints it refuses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.layers import RotaryEmbedding
from slipstream.models.target import Target, load_config, load_target
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.batch import Batch, Rows, Verdict
from slipstream.serve.drafters.base import build_options, find_drafter
from slipstream.serve.drafters.dflash import Drafter
from slipstream.tests.serve.dflash_drafts import MakeDraft, variants_maker
from slipstream.tests.serve.engine_runs import build_engine


@pytest.fixture(scope="module")
def make_draft(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeDraft:
    return variants_maker(make_target, tmp_path_factory)


@dataclass(frozen=True, slots=True)
class Stage:
    """A drafter by itself, with one request whose last 11 tokens have been computed."""

    drafter: Drafter
    target: Target
    batch: Batch
    features: Tensor  # (11, K * H)

    def observed(self, batch: Batch, features: Tensor, verdict: Verdict | None) -> Tensor:
        """The drafter's KV afterwards."""
        self.drafter.observe(batch, features, verdict)
        return self.drafter.attention.flat

    def attach(self) -> SDPABackend:
        """A new, empty cache."""
        kv = self.drafter.kv
        assert kv is not None
        cache = torch.zeros(kv.num_layers, 2, 5, 16, kv.num_kv_heads, kv.head_dim)
        attention = SDPABackend(cache, RotaryEmbedding(kv.rope, kv.head_dim, 64))
        self.drafter.attach(self.target, self.batch.state, attention)
        attention.plan(self.batch)
        return attention


@pytest.fixture(params=["plain", "bias, three layers"])
def stage(request: pytest.FixtureRequest, make_target: Callable[[str], Path], make_draft: MakeDraft) -> Stage:
    config = load_config(make_target("qwen3"))
    target = load_target(make_target("qwen3"), config, torch.float32, torch.device("cpu"))
    drafter = Drafter.load(str(make_draft("qwen3", request.param)), build_options(Drafter, {}), target)
    state, row, lengths = Rows(2, 4, 16, 4, torch.device("cpu")), torch.tensor([0]), torch.tensor([14])
    state.pages[0] = torch.tensor([3, 1, 4, 2])
    positions, slots = state.chain(row, lengths, 11)
    batch = Batch(state, row, lengths, positions, slots, (11,), (25,))
    return Stage(drafter, target, batch, torch.randn(11, len(drafter.feature_layers) * config.hidden_size))


def test_fused_context_equals_the_modules(stage: Stage) -> None:
    """One product and one kernel for all layers store what the module stores layer by layer."""
    module, attention = stage.drafter.module, stage.attach()
    module.write_context(module.fuse(stage.features), attention)
    stage.attach()
    found = stage.observed(replace(stage.batch, next_tokens=stage.batch.slots), stage.features, None)
    torch.testing.assert_close(found, attention.flat, atol=1e-5, rtol=1e-5)
    assert found[:, :, stage.batch.slots].count_nonzero() == found.count_nonzero() > 0


def test_accepted_nodes_of_a_tree_follow_the_committed_tokens(stage: Stage) -> None:
    path = torch.tensor([0, 3, 4, 9])
    features = stage.features.index_copy(0, torch.arange(4), stage.features[path])
    stage.attach()
    verdict = Verdict(torch.arange(11)[None], torch.arange(11)[None], torch.tensor([11]))
    expected = stage.observed(stage.batch, features, verdict)[:, :, stage.batch.slots[:4]]
    stage.attach()
    nodes = torch.nn.functional.pad(path, (0, 7), value=-1)[None].int()
    tree = replace(stage.batch, positions=stage.batch.positions + 5, ancestors=torch.zeros(1, 11, dtype=torch.int64))
    found = stage.observed(tree, stage.features, Verdict(nodes, nodes, torch.tensor([4])))
    torch.testing.assert_close(found[:, :, stage.batch.slots[:4]], expected, atol=1e-6, rtol=1e-6)


def test_options_are_checked(make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    assert find_drafter(str(make_draft("qwen3", "plain"))) is Drafter
    assert build_engine(make_target("qwen3"), make_draft("qwen3", "plain")).widths == (1, 2, 4)
    assert build_engine(make_target("qwen3"), make_draft("qwen3", "from the anchor")).widths == (1, 2, 4, 5)
    for block in (0, 1, 65):
        with pytest.raises(ValueError, match=f"drafter.block is {block}; it must be between 2 and 64"):
            build_options(Drafter, {"block": block})
    with pytest.raises(ValueError, match="drafter.block is 5; .* blocks of 4 and offers at most 4 nodes"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), drafter={"block": 5})
    with pytest.raises(ValueError, match="width is 3; this drafter offers 1, 2, 4"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), width=3)


@pytest.mark.parametrize("key", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_targets_weights_must_be_equal(
    key: str, tmp_path: Path, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    """Other trainers write them along. One that was trained further would draft other tokens than its own."""
    variant = "one window, few tokens, one feature"
    draft, folder = make_draft("qwen3", variant), tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text((draft / "config.json").read_text())
    tensors = load_file(draft / "model.safetensors")
    copy = load_file(make_target("qwen3") / "model.safetensors")
    copy = copy["lm_head.weight" if key == "lm_head.weight" else "model.embed_tokens.weight"].bfloat16()
    copy = copy[tensors["t2d"]] if key == "lm_head.weight" else copy
    save_file(tensors | {key: copy}, folder / "model.safetensors")
    build_engine(make_target("qwen3"), folder)
    copy[3, 3] += 1
    save_file(tensors | {key: copy}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{key} is not the target's; a draft with one of its own is not supported"):
        build_engine(make_target("qwen3"), folder)
