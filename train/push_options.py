"""Options of `slipstream push`. Imports nothing that takes long, so that wrong ones are refused at once."""

import re
from dataclasses import dataclass

from slipstream.models.files.names import check_folder

REPOSITORY = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """Uploads a draft to the Hugging Face hub, with a model card."""

    REQUIRED = {
        "draft": "the output folder of a training run, or a checkpoint in it",
        "repo": "a repository of the hub such as owner/name",
    }
    FIRST = ("draft", "repo")

    draft: str = ""
    """Output folder of a training run, whose best checkpoint is uploaded, or a checkpoint; also accepted as the first
    argument, without a flag."""
    repo: str = ""
    """Repository of the hub, created if it does not exist; also accepted as the second argument."""
    target: str = ""
    """The target's name on the hub, for drafts that were trained for a folder."""
    license: str = ""
    """License of the draft, such as apache-2.0. Default: the target's, if its files say it."""
    private: bool = False
    """Create the repository as a private one."""
    samples: bool = False
    """Upload the sample answers of metrics.jsonl, too: they are text from your data."""
    overwrite: bool = False
    """Upload into a repository that already has files, and replace those of the same name."""
    dry_run: str | None = None
    """Folder to write the same files into; nothing is uploaded."""

    def __post_init__(self) -> None:
        for option, name in (("repo", self.repo), ("target", self.target)):
            if name and not REPOSITORY.fullmatch(name):
                raise ValueError(f"{option} {name} is not a repository of the hub; give a name such as owner/name")

    def check_inputs(self) -> None:
        """Raises ValueError for a draft that does not exist."""
        check_folder("draft", self.draft, self.REQUIRED["draft"])
