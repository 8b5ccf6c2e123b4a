"""Options of the doctor. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.data_tools.options import ConversationOptions
from slipstream.models.drafts.source import source_of
from slipstream.models.files.names import KEY_FILE, check_file
from slipstream.serve.options import check_at_least

QUESTIONS = Path(__file__).resolve().parent.parent / "assets" / "gsm8k.jsonl.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig(ConversationOptions):
    """Says why a draft is accepted badly, and what to do."""

    draft: str = ""
    """Draft checkpoint, of any trainer whose files can be read; or mtp, the head in the target's files. Required, but
    for live."""
    limit: int | None = 64
    """Conversations to replay; null: all. Without data: held-out questions of GSM8K."""
    max_tokens: int = 128
    """Tokens of the target's answers."""
    depth: int = 5
    """Tokens that a chain draft proposes in a round. A block draft proposes its block."""
    live: str | None = None
    """URL of a running server, alone: says whether its drafts are accepted less than before, and why."""
    endpoint: str | None = None
    """URL of a server with this draft, which is asked the same conversations."""
    api_key_file: str | None = None
    """File with the key of that server."""
    aux_layers: tuple[int, ...] | None = None
    """Layer outputs that the draft reads, where its files leave it open."""
    norm_output: bool | None = None
    """Whether an EAGLE3 draft's next step reads the state after the final norm, where its files leave it open."""
    sample_from_anchor: bool | None = None
    """Whether slot 0 of a block draft predicts a token, where its files leave it open."""
    device: str = ""
    """cuda or cpu. Default: a GPU if there is one."""
    output: str = "doctor.html"
    """Page to write; the same as JSON goes beside it."""

    def __post_init__(self) -> None:
        ConversationOptions.__post_init__(self)
        if self.live is None and not self.draft:
            raise ValueError("draft is empty; name a draft checkpoint, as a folder or a hub id, or mtp")
        if self.live is not None and (self.draft or self.endpoint):
            raise ValueError(f"live is {self.live!r}, which is asked without a replay; leave draft and endpoint out")
        check_at_least(self, 2, "max_tokens")
        check_at_least(self, 1, "depth", "limit")

    def check_inputs(self) -> None:
        """Raises ValueError for an input that does not exist."""
        ConversationOptions.check_inputs(self)
        if self.live is None:
            source_of(self.draft, self.target).check_files()
        check_file("api_key_file", self.api_key_file, KEY_FILE)
