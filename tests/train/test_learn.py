"""Learning from what is served: what memory holds, and that its states teach as the target's own do."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.files.learning import LearnJob, ServedText
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.frozen import FrozenTarget, load_frozen_target
from slipstream.serve.engine.learning import text_of
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.serve.engine_runs import build_engine, make_request, run
from slipstream.tests.sources import ROOT, TINY
from slipstream.train.batches import PackedRows
from slipstream.train.learn import Trainer
from slipstream.train.text_ring import HELD_OUT, ServedTexts, Splits, TextRing, dataset_of

CPU = torch.device("cpu")


def text(client: str, number: int, length: int = 10) -> ServedText:
    return ServedText(client, [number] * (length + 1), 4, torch.zeros(length, 2, 8))


def test_a_flood_drives_out_nobody_else() -> None:
    """Against a model: whoever has most gives way, oldest first."""
    generator = random.Random(0)
    ring = TextRing(most_bytes=40 * text("", 0).nbytes)
    model: list[ServedText] = []
    for number in range(2000):
        client = generator.choice("aaaaaaaabc")
        new = text(client, number, generator.choice((5, 10, 20)))
        ring.add(new)
        model.append(new)
        while sum(entry.nbytes for entry in model) > ring.most_bytes:
            sizes = {name: sum(entry.nbytes for entry in model if entry.client == name) for name in "abc"}
            largest = max(sizes, key=lambda name: (sizes[name], name))
            oldest = next(entry for entry in model if entry.client == largest)
            model.remove(oldest)
        assert ring.nbytes.total() == sum(entry.nbytes for entry in model) <= ring.most_bytes
    by_client = {name: [entry for entry in model if entry.client == name] for name in "abc"}
    assert {name: list(texts) for name, texts in ring.texts.items()} == by_client
    sizes = [ring.nbytes[name] for name in "abc"]
    assert max(sizes) - min(sizes) <= 2 * text("", 0, 20).nbytes


def test_held_out_texts_are_never_trained_on() -> None:
    texts = ServedTexts(10**9)
    for number in range(80):
        texts.add(text("ab"[number % 2], number))
    splits = texts.now()
    assert len(splits.heldout) == 80 // HELD_OUT
    tokens = [{entry.tokens[0] for entry in part} for part in splits]
    assert tokens[0].isdisjoint(tokens[1])
    assert {entry.client for entry in splits.heldout} == {"a", "b"}


@pytest.mark.parametrize(("salt", "length", "is_learnt"), [("", 9, True), ("salt", 9, False), ("", 6, False)])
def test_texts_that_opted_out_are_not_taken(salt: str, length: int, is_learnt: bool) -> None:
    """Nor those whose states are not all there."""
    params = SamplingParams(max_tokens=8)
    sequence = Sequence.of(Request(id="a", prompt=[1, 2, 3], params=params, namespace=salt), frozenset(), 1)
    sequence.tokens += [4, 5, 6, 7, 8, 9, 10]
    entry = text_of(sequence, torch.randn(length, 2, 8))
    assert (entry is not None) == is_learnt
    if entry is not None:
        assert (entry.tokens, entry.num_prompt) == (sequence.tokens, 3)


def served_texts(target: FrozenTarget, layers: tuple[int, ...]) -> list[ServedText]:
    """Texts with the target's states, as an engine sends them."""
    generator = torch.Generator().manual_seed(2)
    texts = []
    for length in (9, 40, 23, 64):
        tokens = torch.randint(3, 4000, (length,), generator=generator)
        states, _ = target.aux_states(tokens[None], torch.arange(length)[None])
        texts.append(ServedText("", tokens.tolist(), 5, states[0, :-1].unflatten(1, (len(layers), -1)).clone()))
    return texts


@pytest.mark.parametrize("draft", ["eagle3", "eagle", "dflash"])
def test_states_in_memory_teach_as_the_targets_own(draft: str, tmp_path: Path) -> None:
    folder = ROOT / "tests" / "assets" / draft
    trainer = make_trainer(folder, tmp_path)
    layers = tuple(trainer.job.layers)
    target = load_frozen_target(TINY, layers, CPU)
    texts = served_texts(target, layers)
    rows = trainer.rows(texts)
    assert (rows.num_documents, rows.num_supervised) == (4, sum(len(entry.tokens) - 5 for entry in texts))
    batch = rows.batch([0])
    assert batch.cached is not None
    assert batch.num_supervised == rows.num_supervised
    loss, _ = trainer.training.loss(batch)
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in trainer.training.named_parameters() if x.grad is not None}
    assert gradients
    trainer.training.zero_grad()
    trainer.training.target = load_frozen_target(TINY, trainer.training.draft.config.aux_layers, CPU)
    online = PackedRows(dataset_of(texts), trainer.options.data.max_length).batch([0])
    expected, _ = trainer.training.loss(online)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, x in trainer.training.named_parameters():
        if name in gradients:
            torch.testing.assert_close(gradients[name], x.grad, rtol=1e-4, atol=1e-6)


def make_trainer(draft: Path, folder: Path) -> Trainer:
    layers = {"eagle3": (3, 6), "eagle": (6,), "dflash": (5, 6)}[draft.name]
    job: dict[str, Any] = {"target": str(TINY), "draft": str(draft), "trust_remote_code": False, "device": "cpu"}
    return Trainer(LearnJob(**job, layers=list(layers), memory=10**9, folder=str(folder)))


def answers_of(draft: Path, layers: tuple[int, ...]) -> list[ServedText]:
    """An engine's answers, with the states that it has computed."""
    engine = build_engine(TINY, draft, device="cpu", keep_states=layers)
    texts: list[ServedText | None] = []
    engine.on_states = lambda sequence, states: texts.append(text_of(sequence, states))
    run(engine, [make_request(str(seed), [1, 300 + seed, 17, 25], max_tokens=40) for seed in range(12)])
    return [entry for entry in texts if entry is not None]


def test_rounds_make_held_out_texts_better_and_snapshots_are_drafts(tmp_path: Path) -> None:
    draft = ROOT / "tests" / "assets" / "eagle3"
    trainer = make_trainer(draft, tmp_path)
    texts = answers_of(draft, tuple(trainer.job.layers))
    assert len(texts) == 12
    loop = trainer.loop(Splits(texts, texts[:4]))
    before = trainer.accept_length(loop, trainer.serving)
    for _ in range(40):
        loop.train_step(False)
    trained = trainer.weights()
    after = trainer.accept_length(loop, trained)
    assert after > before
    assert trainer.accept_length(loop, trainer.serving) == before
    assert all(torch.equal(x, trained[name]) for name, x in trainer.weights().items())
    trainer.write(tmp_path / "step", {"accept_length": after})
    network = load_draft(Eagle3, tmp_path / "step", trainer.config, torch.float32, CPU)
    tensors = public_tensors(network)
    assert tensors
    for name, x in public_tensors(trainer.training.draft).items():
        rounded = x.detach().bfloat16().float() if x.is_floating_point() else x
        assert torch.equal(tensors[name].to(rounded.dtype), rounded), name
