"""The result of an examination, which the report shows."""

from dataclasses import dataclass

from slipstream.doctor.diagnosis import KINDS, Diagnosis, Finding
from slipstream.doctor.endpoint import Endpoint
from slipstream.doctor.readings import STAGES
from slipstream.doctor.replay import Score
from slipstream.doctor.texts import Answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that the report shows."""

    draft: str
    target: str
    family: str
    diagnosis: Diagnosis
    answered: tuple[Answered, ...]
    served: float | None = None  # accept length of the engine here; None where the draft could not be served
    variants: tuple[tuple[str, float], ...] = ()  # other ways to render prompts, and their accept lengths
    data_score: Score | None = None  # on the conversations' own answers
    notes: tuple[Finding, ...] = ()
    endpoint: Endpoint | None = None
    facts: tuple[tuple[str, str], ...] = ()  # names and values of what an MTP head holds

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Causes, risks and notes, each in the order of the stages."""
        findings = (*self.diagnosis.findings, *self.notes)
        return tuple(sorted(findings, key=lambda finding: (KINDS.index(finding.kind), STAGES.index(finding.stage))))

    @property
    def is_wrong(self) -> bool:
        return any(finding.kind == "cause" for finding in self.findings)
