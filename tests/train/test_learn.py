"""Learning from what is served: what memory holds, and that its states teach as the target's own do."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.files.learning import TEXT_LEN, LearnJob, Offer, Outcome, ServedText
from slipstream.models.files.state_store import decode
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.frozen import FrozenTarget, load_frozen_target
from slipstream.serve.engine import scheduler
from slipstream.serve.engine.learning import text_of
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.serve.engine_runs import build_engine, make_request, run
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.tables import each_case
from slipstream.train import learn as learn_module
from slipstream.train.batches import PackedRows
from slipstream.train.continuation import MOST_PASSES
from slipstream.train.learn import Lengths, Trainer, add_data, is_better, learn, num_rows, shares_of
from slipstream.train.loop import Loop
from slipstream.train.pace import Pace
from slipstream.train.text_ring import HELD_OUT, ServedTexts, Split, Splits, TextRing, dataset_of, in_fp8

CPU = torch.device("cpu")
LAYERS = {"eagle3": (3, 6), "eagle": (6,), "dflash": (5, 6)}  # whose states a draft needs


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    trainer = make_trainer("eagle3", tmp_path)
    set_length(trainer, 256)
    return trainer


@pytest.fixture(scope="module")
def answers() -> list[ServedText]:
    """An engine's answers, with the states that it has computed."""
    engine = build_engine(TINY, folder_of("eagle3"), device="cpu", keep_states=LAYERS["eagle3"])
    texts = []
    engine.on_states = lambda sequence, read: texts.append(text_of(sequence, read))
    run(engine, [make_request(str(seed), [1, 300 + seed, 17, 25], max_tokens=40) for seed in range(12)])
    return [entry for entry in texts if entry is not None]


def folder_of(draft: str) -> Path:
    return ROOT / "tests" / "assets" / draft


def make_trainer(draft: str, folder: Path) -> Trainer:
    job = {"target": str(TINY), "draft": str(folder_of(draft)), "trust_remote_code": False}
    job |= {"device": "cpu", "share": 1.0, "memory": 10**9, "data": None}
    return Trainer(LearnJob(**job, folder=str(folder), output=str(folder / "passed"), layers=[*LAYERS[draft]]))


def set_length(trainer: Trainer, length: int):
    """In tokens of a row."""
    trainer.options = replace(trainer.options, data=replace(trainer.options.data, max_length=length))


def in_memory(texts: Iterable[ServedText], num_bytes: int = 10**9) -> ServedTexts:
    memory = ServedTexts(num_bytes, 2048)
    for entry in texts:
        memory.add(entry)
    return memory


def loop_of(
    trainer: Trainer, train: list[ServedText], heldout: list[ServedText], past: Sequence[ServedText] = ()
) -> Loop:
    return trainer.loop(Splits(Split({"": train}, {}), Split({"": heldout}, {"": [*past]} if past else {})))


def text(client: str, number: int, length: int = 10) -> ServedText:
    return ServedText(client, [number] * (length + 1), 4, torch.zeros(length, 2, 8))


def test_a_flood_drives_out_nobody_else():
    """Against a model: whoever has most gives way, oldest first; what gives way is returned."""
    generator = random.Random(0)
    ring = TextRing(40 * text("", 0).nbytes, count().__next__)
    model = []
    for number in range(2000):
        client = generator.choice("aaaaaaaabc")
        new = text(client, number, generator.choice((5, 10, 20)))
        gone = ring.add(new)
        model.append(new)
        while sum(entry.nbytes for entry in model) > ring.most_bytes:
            sizes = {name: sum(entry.nbytes for entry in model if entry.client == name) for name in "abc"}
            largest = max(sizes, key=lambda name: (sizes[name], name))
            oldest = next(entry for entry in model if entry.client == largest)
            model.remove(oldest)
            assert gone.pop(0) is oldest
        assert not gone
        assert ring.nbytes.total() == sum(entry.nbytes for entry in model) <= ring.most_bytes
    by_client = {name: [entry for entry in model if entry.client == name] for name in "abc"}
    assert {name: sorted(texts, key=number_of) for name, texts in ring.texts().items()} == by_client
    sizes = [ring.nbytes[name] for name in "abc"]
    assert max(sizes) - min(sizes) <= 2 * text("", 0, 20).nbytes


def number_of(entry: ServedText) -> int:
    return entry.tokens[0]


def test_the_past_is_a_sample_of_the_stream():
    """A tenth of 3,000 texts is past: their mean age is that of all, and what is held out stays so."""
    random.seed(0)
    texts = (text("a", number) for number in range(3000))
    train, heldout = in_memory(texts, 1500 * in_fp8(text("", 0)).nbytes).now()
    for split, share in ((train, 0.4), (heldout, 0.1)):
        recent, past = ([number_of(entry) for entry in part["a"]] for part in split)
        assert {len(recent), len(past)} == {int(share * 1500)}
        assert min(recent) > max(past)
        mean = sum(past) / len(past)
        expected = min(recent) / 2
        assert abs(mean - expected) < 4 * expected / math.sqrt(3 * len(past)), "four standard errors"


def test_held_out_texts_are_never_trained_on():
    """Nor are texts kept whose answers are beyond what is read of them."""
    texts = ServedTexts(10**9, 6)
    for number in range(80):
        texts.add(text("ab"[number % 2], number))
        texts.add(ServedText("long", [number] * 11, 5, torch.zeros(10, 2, 8)))
    train, heldout = texts.now()
    assert heldout.num_recent == 80 // HELD_OUT
    tokens = [{number_of(entry) for entry in chain(*part.recent.values())} for part in (train, heldout)]
    assert tokens[0].isdisjoint(tokens[1])
    assert {*heldout.recent} == {"a", "b"} == {*train.recent}


@pytest.mark.parametrize(("salt", "length", "is_learnt"), [("", 9, True), ("salt", 9, False), ("", 6, False)])
def test_texts_that_opted_out_are_not_taken(salt, length, is_learnt):
    """Nor those whose states are not all there."""
    params = SamplingParams(max_tokens=8)
    sequence = scheduler.Sequence.of(Request(id="a", prompt=[1, 2, 3], params=params, namespace=salt), frozenset(), 1)
    sequence.tokens += [4, 5, 6, 7, 8, 9, 10]
    states = torch.randn(length, 2, 8)
    entry = text_of(sequence, lambda count: states[:count])
    assert (entry is not None) == is_learnt
    if entry is not None:
        assert (entry.tokens, entry.num_prompt) == (sequence.tokens, 3)


@pytest.mark.parametrize(("num_prompt", "num_read"), [(30, [TEXT_LEN - 1]), (TEXT_LEN - 1, [])])
def test_no_more_of_a_text_is_copied_than_a_trainer_reads(num_prompt, num_read):
    request = Request(id="a", prompt=[*range(num_prompt)], params=SamplingParams(max_tokens=8))
    sequence = scheduler.Sequence.of(request, frozenset(), 1)
    sequence.tokens += range(TEXT_LEN)
    calls = []

    def read(count):
        calls.append(count)
        return torch.zeros(count, 2, 8)

    entry = text_of(sequence, read)
    assert calls == num_read
    assert entry is None if not num_read else entry is not None and entry.tokens == sequence.tokens[:TEXT_LEN]


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
def test_states_in_memory_teach_as_the_targets_own(draft, tmp_path):
    trainer = make_trainer(draft, tmp_path)
    layers = LAYERS[draft]
    target = load_frozen_target(TINY, layers, CPU)
    texts = served_texts(target, layers)
    rows = trainer.rows(Split({"": texts}, {}))
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
            torch.testing.assert_close(gradients[name], x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draft", ["eagle3", "dflash"])
def test_states_are_kept_in_fp8(draft, tmp_path):
    """They take half of the bytes of 16 bits, but for scales, and teach as what they decode to does."""
    trainer = make_trainer(draft, tmp_path)
    layers = LAYERS[draft]
    raw = served_texts(load_frozen_target(TINY, layers, CPU), layers)
    entries = in_memory(raw).now().train.recent[""]
    decoded = []
    for entry, before in zip(entries, raw, strict=True):
        assert entry.nbytes == before.states.numel() + entry.scales.nbytes + 8 * len(before.tokens)
        states = decode(entry.states, entry.scales, torch.float32)
        torch.testing.assert_close(states, before.states, rtol=2**-4, atol=float(before.states.abs().max()) / 448)
        decoded.append(replace(before, states=states))
    loss, expected = (
        trainer.training.loss(trainer.rows(Split({"": texts}, {})).batch([0]))[0] for texts in (entries, decoded)
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_clients_and_the_past_have_their_share_of_an_epoch(trainer):
    """Against a count of tokens: a flood takes half at most, and a text is read MOST_PASSES times at most."""
    set_length(trainer, 11)  # a row has a text

    def tokens_of(recent, past):
        split = Split(*({client: [text(client, 7)] * size for client, size in part.items()} for part in (recent, past)))
        rows = trainer.rows(split, shares_of(split))
        return Counter(str(rows.categories[rows.windows.documents[rows.rows[row][0]]]) for row in rows.epoch(0, 0))

    assert tokens_of({"": 50}, {}) == {"recent ": 50}
    assert tokens_of({"": 50}, {"": 20}) == {"recent ": 50, "past ": 50}
    assert tokens_of({"flood": 90, "b": 30}, {"b": 10, "c": 2}) == {
        **{"recent flood": 60, "recent b": 60, "past b": 60, "past c": 2 * MOST_PASSES}
    }


@each_case()
def test_weights_are_offered_that_gain_and_do_not_forget(before, after, best, is_offered):
    assert is_better(Lengths(*before), Lengths(*after), Lengths(*best)) == is_offered


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 100), marks=pytest.mark.slow)])
def test_noise_is_never_offered(trainer, answers, seeds):
    texts = answers[:4]
    loop = loop_of(trainer, texts, texts)
    before = trainer.accept_lengths(loop, trainer.serving)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: x + torch.randn(x.shape, generator=generator) * x.std(correction=0) if x.is_floating_point() else x
            for name, x in trainer.serving.items()
        }
        assert not is_better(before, trainer.accept_lengths(loop, weights), before), seed


def test_evaluations_walk_each_held_out_text_once(trainer, answers):
    """Whatever share of an epoch its client or the past would have."""
    parts = {"a": answers[:6], "b": answers[6:7], "past": answers[7:]}

    def lengths(recent, past):
        loop = trainer.loop(Splits(Split({"": answers}, {}), Split(recent, past)))
        return trainer.accept_lengths(loop, trainer.serving)

    alone = {name: lengths({"": part}, {}).recent for name, part in parts.items()}
    for length in (1024, 48):  # one row, several
        set_length(trainer, length)
        together = lengths({"a": parts["a"], "b": parts["b"]}, {"": parts["past"]})
        assert together[:2] == pytest.approx(((alone["a"] + alone["b"]) / 2, alone["past"]))
        assert together.clients == pytest.approx({"recent a": alone["a"]})


class Verdicts(Exception):
    """There are no more."""


class FakeChannel:
    """An engine that has answered, and judges what it is offered."""

    def __init__(self, texts: ServedTexts, outcomes: list[Outcome], judge: Callable[[Path], None]):
        self.texts = texts
        self.verdicts = self
        self.saving = nullcontext()
        self._outcomes = outcomes
        self._judge = judge

    def send(self, offer: Offer):
        if not self._outcomes:
            raise Verdicts
        self._judge(Path(offer.folder))

    def get(self) -> Outcome:
        return self._outcomes.pop(0)


def learn_from(answers: list[ServedText], trainer: Trainer, outcomes: Sequence[Outcome] = (), judge: Any = None):
    """Three times the answers, up to the offer after the last outcome."""
    channel = FakeChannel(in_memory(answers * 3), [*outcomes], judge)
    with pytest.raises(Verdicts):
        learn(trainer.job, trainer, channel)


def test_what_passed_is_kept_and_what_did_not_is_dropped(trainer, answers, tmp_path, monkeypatch):
    """At every moment the output is the last draft that passed, whole; from it a trainer goes on."""
    monkeypatch.setattr(learn_module, "STEPS", 4)
    monkeypatch.setattr(learn_module, "GAIN", 0.0)
    output = Path(trainer.job.output)
    dead = tmp_path / "step-4"  # a trainer that was killed in a trial had its weights there
    dead.mkdir()
    offers = []

    def judge(folder):
        if offers:
            assert (output / "model.safetensors").read_bytes() == offers[0], "the first, which passed"
        offers.append((folder / "model.safetensors").read_bytes())

    learn_from(answers, trainer, ["passed", "worse"], judge)
    assert len({*offers}) == len(offers) == 2
    assert (output / "model.safetensors").read_bytes() == offers[0]
    (last,) = {*tmp_path.glob("step-*")} - {dead}
    assert (last / "model.safetensors").is_file(), "the last one, which nobody judged"
    later = Trainer(replace(trainer.job, draft=str(output)))
    assert later.lineage["learned_from"] == trainer.job.draft
    for name, x in later.serving.items():
        torch.testing.assert_close(x, trainer.serving[name], rtol=2**-8, atol=0)


def test_weights_that_went_astray_are_dropped(trainer, answers, monkeypatch):
    """Training goes on from those that serve."""
    monkeypatch.setattr(learn_module, "STEPS", 1)
    trainer.load({name: 3 * x if x.is_floating_point() else x for name, x in trainer.serving.items()})
    load = trainer.load

    def load_and_end(weights):
        load(weights)
        raise Verdicts

    monkeypatch.setattr(trainer, "load", load_and_end)
    learn_from(answers, trainer)
    for name, x in trainer.weights().items():
        assert torch.equal(x, trainer.serving[name]), name


def test_a_trainer_rests_after_each_piece_of_work(trainer, answers, monkeypatch):
    """Steps and evaluations, three seconds for each that a forward pass takes, by a clock of its own."""
    monkeypatch.setattr(learn_module, "STEPS", 4)
    monkeypatch.setattr(learn_module, "GAIN", 0.0)
    seconds = Counter()
    trainer.training.register_forward_pre_hook(lambda *_: seconds.update(work=1))
    clock = SimpleNamespace(monotonic=seconds.total, sleep=lambda rest: seconds.update(rest=rest))
    monkeypatch.setattr("slipstream.train.pace.time", clock)
    trainer.pace = Pace(0.25, lambda: True)
    learn_from(answers, trainer)
    assert seconds["work"] >= 4 + 2
    assert seconds["rest"] == pytest.approx(3 * seconds["work"])


@pytest.mark.parametrize("draft", ["eagle3", "eagle", "dflash"])
def test_memory_is_taken_without_a_trace(draft, tmp_path):
    """The step is as long as any, and the trainer is as it was."""
    trainer = make_trainer(draft, tmp_path)
    set_length(trainer, 256)
    first = trainer.weights()
    passes = []
    trainer.training.register_forward_hook(lambda module, batch, _: passes.append((module.training, batch[0])))
    trainer.take_memory()
    assert [is_step for is_step, _ in passes] == [True, False]
    for _, batch in passes:
        assert batch.tokens.shape == (1, trainer.options.data.max_length)
        assert batch.num_supervised == trainer.options.data.max_length - 1
    assert all(torch.equal(x, first[name]) for name, x in trainer.weights().items())
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    assert trainer.progress == make_trainer(draft, tmp_path).progress


def test_a_step_takes_as_many_rows_as_there_are_and_as_fit(trainer, answers):
    """At the rate for steps of so many tokens. Where memory lacks, of half as many."""
    assert [num_rows(length) for length in (1, 2048, 16384, 16385, 131072)] == [16384, 8, 1, 1, 1]
    trainer.most_rows = 8
    sizes = []

    def lack(module, batch):
        sizes.append((module.training, len(batch[0].tokens)))
        if sizes[-1] in ((True, 8), (False, 4)):
            raise torch.OutOfMemoryError

    lacks = trainer.training.register_forward_pre_hook(lack)
    trainer.take_memory()
    assert sizes == [(True, 8), (True, 4), (False, 4), (True, 2), (False, 2)]
    assert trainer.most_rows == 2
    sizes.clear()
    lacks.remove()
    set_length(trainer, 128)
    for most_rows, size in ((1, 1), (3, 3), (64, 5)):
        trainer.most_rows = most_rows
        loop = loop_of(trainer, answers, answers[:1])
        assert (len(loop.train), loop.schedule.rows_per_step) == (5, size)
        width = trainer.config.hidden_size
        rate = 0.3 * 0.015 * (576 / width) ** 0.5 * (size * 128 / 16_384) ** 0.25
        assert loop.schedule.optim.lr == pytest.approx(rate)


def test_weights_are_measured_once_on_the_same_texts(trainer, answers):
    passes = []
    trainer.training.register_forward_hook(lambda *_: passes.append(1))

    def lengths(train, heldout, count):
        loop = loop_of(trainer, answers[:train], answers[:heldout])
        lengths = trainer.measured_lengths(loop, trainer.serving)
        assert len(passes) == count
        assert lengths == trainer.accept_lengths(loop, trainer.serving)
        passes.pop()
        return lengths

    assert lengths(8, 3, count=1) == lengths(9, 3, count=1)
    lengths(9, 4, count=2)


def test_evaluations_have_their_share_of_the_time(trainer, answers, monkeypatch):
    """By a clock of which every look takes a second. Rounds end where texts that stay bring no more."""
    monkeypatch.setattr(learn_module, "STEPS", 2)
    monkeypatch.setattr(learn_module, "EVALUATION_SHARE", 0.25)
    monkeypatch.setattr(learn_module, "GAIN", math.inf)
    recent = iter((1.2, 1.0, 1.3, 1.3))
    steps = []

    def lengths(*_):
        steps.append(trainer.progress.step)
        return {"recent ": next(recent)}

    def sleep(_):
        raise Verdicts

    monkeypatch.setattr(trainer, "lengths", lengths)
    monkeypatch.setattr(learn_module, "time", SimpleNamespace(monotonic=count().__next__, sleep=sleep))
    learn_from(answers, trainer)
    # two evaluations after two steps, so four more until they are a quarter; then one, and three steps
    assert steps == [2, 2, 6, 9]
    assert trainer.seconds == {"steps": 9, "evaluations": 4}


def test_texts_of_training_are_the_past(trainer, tmp_path, monkeypatch):
    """Up to the end of the first answer; not one whose states the engine had no memory for."""
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(3, 4000, (length,), generator=generator).tolist() for length in (20, 9, 30, 12, 11)]
    masks = [[place % 10 >= 4 for place in range(len(tokens))] for tokens in ids]
    masks[1] = [False] * 9
    masks[4] = [place >= 4 for place in range(11)]
    rows = Dataset.from_dict({"input_ids": ids, "loss_mask": masks})
    folder = tmp_path / "data"
    DatasetDict({"train": rows, "heldout": rows.select([3])}).save_to_disk(folder)
    files = {*folder.rglob("*")}
    texts = ServedTexts(10**9, 2048)
    monkeypatch.setattr(learn_module, "DATA_TOKENS", 20)

    def states_of(documents):
        assert sum(map(len, documents)) <= 20
        if any(len(tokens) == 11 for tokens in documents):
            return torch.empty(0, 4, 1)
        return torch.tensor([*chain(*documents)])[:, None, None].expand(-1, 4, 8) + torch.zeros(4, 8)

    channel = SimpleNamespace(texts=texts, states_of=states_of)
    add_data(replace(trainer.job, data=str(folder)), trainer, channel)
    assert {*folder.rglob("*")} == files, "it is read alone"
    train, heldout = texts.now()
    assert not train.recent
    (entries,) = train.past.values()
    assert sorted(len(entry.tokens) for entry in entries) == [10, 10, 10]
    assert {entry.num_prompt for entry in entries} == {4}
    for entry in (*entries, *heldout.past["learn.data"]):
        assert entry.scales is not None
        values = decode(entry.states, entry.scales, torch.float32)
        expected = torch.tensor(entry.tokens[:-1])[:, None, None].expand(-1, 4, 8).float()
        torch.testing.assert_close(values, expected, rtol=2**-4, atol=0.0)


def test_rounds_make_held_out_texts_better_and_snapshots_are_drafts(trainer, answers, tmp_path):
    assert len(answers) == 12
    loop = loop_of(trainer, answers, answers[:4], answers[4:8])
    before = trainer.accept_lengths(loop, trainer.serving)
    for _ in range(20):
        loop.train_step(False)
    trained = trainer.weights()
    weights = trainer.new_weights()
    after = trainer.accept_lengths(loop, weights)
    assert after.recent > before.recent
    assert after.past > before.past > 0
    assert trainer.accept_lengths(loop, trainer.serving) == before
    assert all(torch.equal(x, trained[name]) for name, x in trainer.weights().items())
    for name, x in weights.items():
        torch.testing.assert_close(x, ((trainer.best[name].double() + trained[name].double()) / 2).to(x.dtype))
    (tmp_path / "step").mkdir()
    trainer.write(weights, tmp_path / "step", {"metrics": after._asdict()})
    network = load_draft(Eagle3, tmp_path / "step", trainer.config, torch.float32, CPU)
    tensors = public_tensors(network)
    assert tensors
    trainer.load(weights)
    for name, x in public_tensors(trainer.training.draft).items():
        rounded = x.detach().bfloat16().float() if x.is_floating_point() else x
        assert torch.equal(tensors[name].to(rounded.dtype), rounded), name
