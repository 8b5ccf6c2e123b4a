"""Causes in the texts: prompts that training rendered otherwise, answers that are not the target's, repetition; and
whether the engine here, or a server, accepts what the replay says."""

from collections.abc import Iterator, Mapping, Sequence

from slipstream.doctor.diagnosis import Diagnosis, Finding, Kind
from slipstream.doctor.endpoint import Endpoint
from slipstream.doctor.replay import Score
from slipstream.doctor.texts import Answered

GAIN = 1.15  # gain of accept length from which other texts are taken to be those of the training
REPEATS = 0.3  # share of repeated pieces in the answers, from which they say little about real use
PARITY = 0.03  # relative difference between the replay and the engine here that goes without saying
LOSS = 0.1  # loss of accept length from which a server is said to accept less
ALIKE = 0.05  # relative difference of accept lengths from which a reading does not explain a server's
MOSTLY = 0.5  # share of different answers from which a server's target is said to be another one


def loops(answered: Sequence[Answered]) -> bool:
    """Whether the answers repeat themselves so much that their accept length says little."""
    return sum(answer.repeats for answer in answered) > REPEATS * len(answered)


def repetition(answered: Sequence[Answered]) -> Iterator[Finding]:
    if loops(answered):
        repeats = sum(answer.repeats for answer in answered) / len(answered)
        yield Finding(
            "cause",
            "text",
            "answers that repeat themselves",
            f"{100 * repeats:.0f} % of the answers' pieces occurred before in them: on these prompts the target "
            "loops. Any draft guesses a loop, so this accept length says nothing about real use",
            "measure with conversations as users send them, rendered by the chat template",
        )


def paired(
    answered: Sequence[Answered], score: Score, other_answers: Sequence[Answered], other: Score
) -> tuple[Score, Score] | None:
    """Both scores over the conversations that both have; None if there are none."""
    places = {id(answer.conversation): place for place, answer in enumerate(answered)}
    pairs = [
        (places[id(answer.conversation)], at)
        for at, answer in enumerate(other_answers)
        if id(answer.conversation) in places
    ]
    if not pairs:
        return None
    indices, other_indices = zip(*pairs, strict=True)
    return score.of(indices), other.of(other_indices)


def off_policy(score: Score, data_score: Score) -> Iterator[Finding]:
    """`score`: over the target's answers; `data_score`: over the data's answers to the same conversations."""
    gain, low = data_score.ratio(score)
    if gain > GAIN and low > 1:
        yield Finding(
            "cause",
            "text",
            "answers of another model",
            "the draft predicts the answers of the data better than the target's own: it was trained on answers "
            "that the target did not write",
            "let the target answer the training data's prompts (`slipstream regenerate`), and train on that",
            before=score.accept_length,
            after=data_score.accept_length,
        )


def other_prompts(scores: Mapping[str, tuple[Score, Score]]) -> Iterator[Finding]:
    """`scores`: by the name of a way to render prompts, the default's score and its own, of the same conversations."""
    comparisons = {name: (other.ratio(score), score, other) for name, (score, other) in scores.items()}
    better = {name: entry for name, entry in comparisons.items() if entry[0][0] > GAIN and entry[0][1] > 1}
    if better:
        name, (_, score, other) = max(better.items(), key=lambda item: item[1][0])
        yield Finding(
            "cause",
            "prompt text",
            f"prompts of another kind: {name}",
            f"the draft is accepted better where prompts are rendered with {name}: so were the conversations "
            "that it was trained on",
            f"serve with {name}, or train the draft on both kinds of prompts",
            before=score.accept_length,
            after=other.accept_length,
        )


def parity(diagnosis: Diagnosis, served: float | None, refusal: str) -> Iterator[Finding]:
    """Whether the engine here accepts what the replay says. `refusal`: why it did not draft."""
    if diagnosis.as_read is None:
        return
    simulated = diagnosis.as_read.accept_length
    if refusal:
        name = "not served here"
        cause = f"the engine here refuses the draft: {refusal}"
        remedy = "see there"
    elif served is not None and abs(served / simulated - 1) > PARITY:
        name = "trainer and server here differ"
        cause = f"replayed, the draft has an accept length of {simulated:.2f}, served here {served:.2f}"
        remedy = "please report this with the draft's config.json: both run the same network"
    else:
        return
    yield Finding("note", "files", name, cause, remedy)


def endpoint_findings(diagnosis: Diagnosis, endpoint: Endpoint) -> Iterator[Finding]:
    """Finds where a server's accept length departs from the replay's: in the prompts, in the target, or in how it reads
    the draft's files."""
    server = f"{endpoint.server} at {endpoint.url}"
    num_prompts = endpoint.num_prompts
    simulated = None if diagnosis.as_read is None else _at_depth(diagnosis.as_read, endpoint.depth)
    accept_length = endpoint.accept_length
    is_less = simulated is not None and accept_length is not None and accept_length < (1 - LOSS) * simulated
    kind: Kind = "cause" if is_less else "note"
    lengths = {"before": accept_length, "after": simulated} if is_less else {}
    if accept_length is None:
        yield Finding(
            "note",
            "text",
            "a server that tells no rounds",
            f"{server} tells its rounds neither in answers nor in /metrics, or drafts nothing",
            "start it with a draft and with its metrics (SGLang: --enable-metrics)",
        )
    if endpoint.other_prompts:
        yield Finding(
            kind,
            "prompt text",
            "prompts of the server differ",
            f"{endpoint.other_prompts} of {num_prompts} prompts have another number of tokens at {server}: it "
            "has another chat template, system prompt, date or tokenizer",
            "start it with the target's chat template, or give its variables here (--date, --template)",
            **lengths,
        )
    elif endpoint.other_answers > MOSTLY * num_prompts:
        yield Finding(
            kind,
            "target's states",
            "answers of the server differ",
            f"{endpoint.other_answers} of {num_prompts} answers differ at {server} at temperature 0, though the "
            "prompts are as long: its target has other weights, or another quantisation",
            "serve the target that the draft was trained for, or train the draft on for that one (--init-from)",
            **lengths,
        )
    elif is_less:
        assert accept_length is not None
        yield _misread(diagnosis, endpoint, accept_length, lengths)


def _misread(
    diagnosis: Diagnosis, endpoint: Endpoint, accept_length: float, lengths: Mapping[str, float | None]
) -> Finding:
    """The server reads the files otherwise: as the reading whose accept length is nearest to its own, if one is."""
    risks = [
        (risk.before, risk.name, risk.remedy) for risk in diagnosis.findings if risk.kind == "risk" and risk.before
    ]
    tried = [(length, name, "") for _, name, length in diagnosis.tried]
    for readings in (risks, tried):
        near = min(readings, key=lambda reading: abs(reading[0] - accept_length), default=None)
        if near is not None and abs(near[0] / accept_length - 1) < ALIKE:
            guess = f"; it accepts as much as with the reading {near[1]!r}"
            remedy = near[2]
            break
    else:
        guess = ""
        remedy = ""
    return Finding(
        "cause",
        "files",
        f"{endpoint.server} reads the draft otherwise",
        f"on the same prompts, with the same answers, {endpoint.server} at {endpoint.url} accepts less than this "
        f"draft does here: the gap is in how that server reads the files{guess}",
        remedy or "mend what is listed as a risk, or serve the draft with Slipstream to compare",
        **lengths,
    )


def _at_depth(score: Score, depth: float | None) -> float:
    """Estimates the accept length of rounds in which `depth` tokens are drafted on average, as adaptive servers do."""
    if depth is None or depth >= score.depth:
        return score.accept_length
    rates = score.by_position
    num_full = int(depth)
    return min(score.accept_length, 1 + sum(rates[:num_full]) + (depth - num_full) * rates[num_full])
