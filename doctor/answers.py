"""The target's own answers, made by the engine here with the draft that is examined, and its accept length there."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.doctor.replay import FAMILIES
from slipstream.doctor.texts import Answered, Conversation, usable
from slipstream.models.drafts.base import Choices
from slipstream.models.drafts.speculators_layout import from_speculators
from slipstream.models.files.checkpoint import Values, read_json
from slipstream.models.targets.decoder import load_config
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Engine:
    """`refusal`: why it runs without the draft; empty: it drafts."""

    llm: LLM
    refusal: str
    max_tokens: int

    def answer(
        self, prompts: Sequence[str], conversations: Sequence[Conversation]
    ) -> tuple[list[Answered], float | None]:
        """The greedy answers that are long enough to be replayed, and the accept length; None without a draft."""
        encoded = [self.llm.encode(text) for text in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        generations = self.llm.generate(encoded, params, progress=True)
        triples = zip(encoded, generations, conversations, strict=True)
        answers = usable(
            [Answered(prompt, generation.tokens, conversation) for prompt, generation, conversation in triples]
        )
        if not answers:
            raise ValueError("the target's answers have fewer than two tokens each; give other conversations")
        rounds = sum(generation.stats.rounds for generation in generations)
        emitted = sum(len(generation.tokens) - 1 for generation in generations)
        return answers, None if self.refusal or not rounds else emitted / rounds

    def text(self, answered: Answered) -> str:
        return str(self.llm.tokenizer.decode(answered.answer, skip_special_tokens=True))


@contextmanager
def open_engine(
    target: Path, draft: Path | str, family: str, choices: Choices, depth: int, max_tokens: int, **options: Any
) -> Iterator[Engine]:
    """The target with the draft or, where the engine refuses that, alone. `options` of EngineConfig."""
    options |= {"target": str(target), "grammar_drafts": False}
    llm = None
    refusal = ""
    try:
        llm = LLM(draft=str(draft), **drafting(target, draft, family, choices, depth), **options)
    except ValueError as error:
        refusal = str(error)
    llm = llm or LLM(draft="none", **options)
    try:
        yield Engine(llm, refusal, max_tokens)
    finally:
        llm.engine.close()
        del llm
        gc.collect()


def drafting(target: Path, draft: Path | str, family: str, choices: Choices, depth: int) -> Values:
    """Options of an engine that verifies all that the draft proposes, as the replay does. Raises ValueError for a
    config.json that cannot be read."""
    drafter: dict[str, Any] = {name: value for name, value in asdict(choices).items() if value is not None}
    if family != "dflash":
        return {"drafter": {**drafter, "depth": depth}, "width": depth + 1}
    Config = FAMILIES[family].training.Network.Config
    spec = load_config(target)
    values = from_speculators(read_json(Path(draft) / "config.json"))
    config: Any = Config.from_json(Config.settle(values, spec, choices, None), spec)
    return {"drafter": drafter, "width": config.num_proposals + 1}
