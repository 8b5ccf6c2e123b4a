"""Replays answers of the target through a draft, as its files are read or as they might be meant.

The accept length is the one that training simulates (train/acceptance.py): what a server accepts at temperature 0. The
target runs once over the texts; its states of all layers are kept, so that a reading that takes others costs nothing.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.models.drafts.base import Choices, DraftFiles, DraftNetwork, build_draft
from slipstream.models.drafts.mtp import load_mtp
from slipstream.models.drafts.mtp_trial import choose_hidden
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import Target
from slipstream.models.targets.families import MTP_FORMS, Hidden
from slipstream.models.targets.frozen import DecoderTarget
from slipstream.train import dflash, eagle, eagle3, mtp
from slipstream.train.acceptance import Walk
from slipstream.train.batches import Batch
from slipstream.train.training import DraftTraining

RESAMPLES = 400
SEED = 0


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of draft: the program that trains it."""

    training: type[DraftTraining]
    options: Callable[[], Any]  # of training


FAMILIES: Mapping[str, Family] = {
    "eagle": Family(eagle.EagleTraining, eagle.DraftOptions),
    "eagle3": Family(eagle3.Eagle3Training, eagle3.DraftOptions),
    "mtp": Family(mtp.MTPTraining, mtp.DraftOptions),
    "dflash": Family(dflash.DFlashTraining, dflash.DraftOptions),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A draft as somebody reads its files."""

    family: str
    files: DraftFiles
    choices: Choices = field(default_factory=Choices)
    mask_embedding: Tensor | None = None  # (H,) of a block draft's mask token, in place of the target's
    most_positions: int | None = None  # beyond which rotary angles stay as they are
    in_target: bool = False  # an MTP head in the target's files; `files` is empty
    hidden: Hidden | None = None  # the state that such a head reads
    edits: tuple[Callable[[Any], None], ...] = ()  # changes of the network once it is read

    def with_values(self, **values: Any) -> "Subject":
        """Returns the draft with other fields of config.json; None deletes a field."""
        changed = {**self.files.values, **values}
        new_values = {name: value for name, value in changed.items() if value is not None or name not in values}
        return dataclasses.replace(self, files=self.files._replace(values=new_values))

    def with_tensors(self, **tensors: Tensor | None) -> "Subject":
        """Returns the draft with other tensors; None deletes a tensor."""
        changed = {**self.files.tensors, **tensors}
        new_tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
        return dataclasses.replace(self, files=self.files._replace(tensors=new_tensors))

    def section(self, name: str, *left_out: str) -> dict[str, Any]:
        """The fields of a section of config.json, without those `left_out`."""
        fields = self.files.values.get(name) or {}
        return {field: value for field, value in fields.items() if field not in left_out}

    def names(self, name: str) -> list[str]:
        """The names in the files of the tensor with this public name: some trainers prefix it."""
        return [alias for alias in (name, f"model.{name}") if alias in self.files.tensors]

    def tensor(self, name: str) -> Tensor | None:
        """The tensor with this public name."""
        return next((self.files.tensors[alias] for alias in self.names(name)), None)

    def with_choices(self, **choices: Any) -> "Subject":
        return dataclasses.replace(self, choices=dataclasses.replace(self.choices, **choices))


@dataclass(frozen=True, slots=True)
class Round:
    """One round of drafting, of the answer numbered `answer`."""

    answer: int
    position: int  # in its document
    accepted: int


@cache
def resampled(count: int) -> NDArray[np.int64]:
    """(RESAMPLES, count) random choices of so many answers."""
    rng = random.Random(SEED)
    return np.array([rng.choices(range(count), k=count) for _ in range(RESAMPLES)])


@dataclass(frozen=True, slots=True)
class Score:
    """The acceptance of a reading."""

    emitted: tuple[int, ...]  # by answer: tokens without the first
    rounds: tuple[Round, ...]
    depth: int  # most tokens that a round drafts

    @property
    def accept_length(self) -> float:
        """Tokens a round, over all answers."""
        return sum(self.emitted) / max(len(self.rounds), 1)

    @property
    def by_position(self) -> list[float]:
        """Share of rounds that accept their 1st, 2nd, ... drafted token."""
        count = max(len(self.rounds), 1)
        return [sum(entry.accepted > place for entry in self.rounds) / count for place in range(self.depth)]

    def by_group(self, groups: Sequence[str]) -> dict[str, float]:
        """Accept length of the answers of each group; `groups` names the group of each answer."""
        rounds = dict.fromkeys(groups, 0)
        emitted = dict.fromkeys(groups, 0)
        for entry in self.rounds:
            rounds[groups[entry.answer]] += 1
        for name, count in zip(groups, self.emitted, strict=True):
            emitted[name] += count
        return {name: emitted[name] / count for name, count in rounds.items() if count}

    def by_context(self, bounds: Sequence[int]) -> dict[str, float]:
        """Tokens a round of the rounds that begin before each of the ascending `bounds` and after the one below."""
        lengths = {}
        for low, high in zip((0, *bounds), (*bounds, None), strict=True):
            emitted = [
                entry.accepted + 1
                for entry in self.rounds
                if entry.position >= low and (not high or entry.position < high)
            ]
            if emitted:
                lengths[f"{low}-{high}" if high else f"{low} and more"] = sum(emitted) / len(emitted)
        return lengths

    def of(self, answers: Sequence[int]) -> "Score":
        """The score over these answers alone, in this order."""
        places = {answer: place for place, answer in enumerate(answers)}
        rounds = [
            dataclasses.replace(entry, answer=places[entry.answer]) for entry in self.rounds if entry.answer in places
        ]
        return Score(tuple(self.emitted[answer] for answer in answers), tuple(rounds), self.depth)

    def ratio(self, other: "Score") -> tuple[float, float]:
        """accept_length / other's, and the lower end of its 95 % interval, by resampling answers. Both are over the
        same answers, or over answers to the same conversations in the same order."""
        samples = resampled(len(self.emitted))
        emitted = [np.array(score.emitted)[samples].sum(1) for score in (self, other)]
        counts = [
            np.bincount([entry.answer for entry in score.rounds], minlength=len(self.emitted))
            for score in (self, other)
        ]
        rounds = [np.maximum(num_rounds[samples].sum(1), 1) for num_rounds in counts]
        ratios = emitted[0] / rounds[0] * rounds[1] / np.maximum(emitted[1], 1)
        return self.accept_length / other.accept_length, float(np.sort(ratios)[RESAMPLES // 40])


class _Walks:
    """Collects the walks of an evaluation, in place of a run's sample answers."""

    def __init__(self) -> None:
        self.walks: list[Walk] = []

    def add(self, batch: Batch, walks: Iterable[Walk]) -> None:
        self.walks += walks


class ReplayedTarget(DecoderTarget):
    """Runs the target once over each batch and keeps the states of every layer."""

    def __init__(self, model: Target) -> None:
        self.count = model.config.num_layers + 1
        super().__init__(model, tuple(range(self.count)))
        self.wanted: tuple[int, ...] = ()
        self.mask_token: tuple[int, Tensor] | None = None
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def aux_states(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        key = tokens.data_ptr()
        if key not in self._kept:
            self._kept[key] = super().aux_states(tokens, positions)
        states, final = self._kept[key]
        parts = states.unflatten(-1, (self.count, -1))[..., list(self.wanted), :]
        return parts.flatten(-2), final

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        embeds = super().embed(tokens)
        if self.mask_token is None:
            return embeds
        token, vector = self.mask_token
        return torch.where((tokens == token).unsqueeze(-1), vector.to(embeds), embeds)


class Replay:
    """Texts, and the target that wrote them, for any number of readings of a draft."""

    def __init__(self, target: Target, path: Path, batches: Sequence[Batch], depth: int) -> None:
        """`path` of the draft, for errors. `depth`: most tokens that a round drafts."""
        self.target = ReplayedTarget(target)
        self.path = path
        self.batches = list(batches)
        self.depth = depth
        form = MTP_FORMS.get(target.config.architecture)
        self._hidden = None if form is None else form.hidden  # the state that an MTP head reads; None: not tried yet
        self.longest = max(int(batch.positions.max()) + 1 for batch in batches)

    def build(self, subject: Subject) -> DraftNetwork:
        """Raises ValueError for files that cannot be read so."""
        model = self.target.model
        network: Any
        if subject.in_target:
            network = load_mtp(model)
            choose_hidden(network, model, subject.hidden or self._hidden)
            if subject.hidden is None:
                self._hidden = network.config.hidden  # a trial takes longer than a reading
        else:
            network = build_draft(
                FAMILIES[subject.family].training.Network,
                subject.files,
                self.path,
                target=model.config,
                dtype=model.dtype,
                device=model.device,
                shared=model.shared,
                choices=subject.choices,
            )
        for edit in subject.edits:
            edit(network)
        return network

    @torch.inference_mode()
    def score(self, subject: Subject, num_batches: int | None = None, depth: int | None = None) -> Score:
        """Scores all texts, or those of the first batches; `depth` in place of the replay's. Raises ValueError for
        files that cannot be read so."""
        draft: Any = self.build(subject)
        family = FAMILIES[subject.family]
        config = draft.config
        target = self.target
        target.wanted = config.aux_layers
        target.mask_token = None
        if subject.mask_embedding is not None:
            target.mask_token = config.mask_token_id, subject.mask_embedding
        rope = self._rope(config, subject.most_positions)
        draft.requires_grad_(False)
        training = family.training(draft, target, rope, family.options(), depth or self.depth).eval()
        emitted: list[int] = []
        rounds: list[Round] = []
        for batch in self.batches[:num_batches]:
            training.samples = walks = _Walks()  # type: ignore[assignment]
            training(batch)
            positions = batch.positions.flatten().tolist()
            for walk in walks.walks:
                rounds += [Round(len(emitted), positions[root], accepted) for root, accepted in walk.rounds]
                emitted.append(walk.last - walk.first)
        return Score(tuple(emitted), tuple(rounds), training.depth)

    def _rope(self, config: Any, max_positions: int | None) -> RotaryEmbedding:
        rope = RotaryEmbedding(config.rope, config.head_dim, self.longest + max(self.depth, 64))
        if max_positions is not None:
            rope.cos[max_positions:] = rope.cos[max_positions - 1]
            rope.sin[max_positions:] = rope.sin[max_positions - 1]
        return rope.to(self.target.model.device)
