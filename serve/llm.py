"""The offline API: `LLM(target, draft).generate(prompts, params)`, with the same engine as the server and no HTTP."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self

from tqdm import tqdm

from slipstream.models.pretrained import load_tokenizer
from slipstream.serve.detokenize import Decoder, Text, TextStream, WholeText
from slipstream.serve.engine import Engine
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import FinishReason, Output, Request, RequestStats, SamplingParams


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. `tokens` ends with the end-of-text token where there is one; `text` leaves it out."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    stats: RequestStats


class LLM:
    """A target, with or without a draft, in this process. Keyword arguments are the fields of EngineConfig."""

    def __init__(self, target: str = "", draft: str = "none", **options: Any) -> None:
        config = EngineConfig(target=target, draft=draft, **options)
        _, path = find_target(config)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        self.engine = Engine(config)
        self._decoder = Decoder(self.tokenizer)

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        stop: str | Sequence[str] = (),
        progress: bool = False,
    ) -> list[Generation]:
        """Answers in the order of the prompts: texts, tokenised as they stand, or token ids.

        Raises ValueError for a prompt that cannot be served, before anything is generated.
        """
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stop:
            raise ValueError("stop has an empty string, which would end every answer at once; leave it out")
        if isinstance(prompts, str):
            raise ValueError(f"prompts is the text {prompts[:20]!r}; give a list of prompts")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params has {len(each)} entries for {len(prompts)} prompts; give one, or one per prompt")
        requests = [
            Request(id=str(index), prompt=self.encode(prompt), params=one)
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]
        for request in requests:
            self.engine.check(request)
        texts = [self._text(stop) for _ in requests]
        answers: list[list[int]] = [[] for _ in requests]
        pieces: list[list[str]] = [[] for _ in requests]
        done: dict[int, Generation] = {}
        bar = tqdm(total=len(requests), unit="answer", disable=not progress)
        with bar, closing(self.stream(requests)) as outputs:
            for output in outputs:
                index = int(output.request_id)
                answers[index] += output.tokens
                pieces[index].append(texts[index].push(output.tokens, output.finish_reason))
                ended = output
                if texts[index].stopped and not output.finish_reason:
                    ended = self.engine.abort(output.request_id) or output
                if ended.finish_reason and index not in done:
                    done[index] = _generation(answers[index], pieces[index], texts[index], ended)
                    bar.update()
        return [done[index] for index in range(len(requests))]

    def close(self) -> None:
        """Ends the engine: a drafter that keeps what it has learned writes it. Not to be used after."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)

    def _text(self, stop: tuple[str, ...]) -> Text:
        return TextStream(self._decoder, stop) if stop else WholeText(self._decoder)

    def stream(self, requests: Iterable[Request]) -> Generator[Output, None, None]:
        """Outputs of every request as they come. Requests are drawn while the engine has room, so they may be many.

        Closing it, or an error, aborts those that have not ended.
        """
        pending = iter(requests)
        added: set[str] = set()
        more = True
        try:
            while more or self.engine.has_work:
                while more and self.engine.num_open < 2 * self.engine.config.max_running:
                    request = next(pending, None)
                    more = request is not None
                    if request is not None:
                        self.engine.add(request)
                        added.add(request.id)
                for output in self.engine.step():
                    if output.finish_reason:
                        added.discard(output.request_id)
                    yield output
        finally:
            for name in added:
                self.engine.abort(name)


def _generation(tokens: list[int], pieces: list[str], text: Text, ended: Output) -> Generation:
    assert ended.stats is not None
    assert ended.finish_reason is not None
    reason: FinishReason = "stop" if text.stopped else ended.finish_reason
    return Generation(tokens[: text.num_tokens], "".join(pieces), reason, text.cut(replace(ended.stats)))
