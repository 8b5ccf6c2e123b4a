"""Uploads a draft to the Hugging Face hub, with a model card.

    slipstream push runs/draft owner/name
    slipstream push runs/draft/best owner/name --dry-run folder

Writes config.json, the weights, run.json, README.md and, of a run, metrics.jsonl. Local paths are taken out, and so are
sample answers, which are text from the user's data. The optimizer's state stays at home.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import get_token

from slipstream.models.drafts.adapters import is_adapter
from slipstream.models.drafts.speculators_layout import drafter_of_kind, from_speculators, speculators_kind
from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.checkpoint import INDEX, Values, config_target, read_header, read_json, weight_files
from slipstream.models.files.names import may_be_hub_id
from slipstream.models.files.outputs import FolderKind, check_output_folder, step_folders
from slipstream.train.model_card import TITLES, Card
from slipstream.train.push_options import PushConfig
from slipstream.train.trackers import read_lines

PUSHED = FolderKind("a draft for the hub", ("README.md", "config.json", "run.json"), (r"model.*", r"metrics\.jsonl"))
# Paths that say where they begin, which may have spaces, and other words with a slash.
PATH = re.compile(r"(?<![^\s,={}\[\](\"'])(?:~\w*|\.{0,2})/[^,={}\[\]()\"':]*|[^\s,={}\[\]()\"']*/[^\s,={}\[\]()\"':]*")
KEEP = {".gitattributes"}  # which the hub writes itself
Files = dict[str, bytes | Path]  # name -> contents, or the file that has them


@dataclass(frozen=True, slots=True)
class Source:
    checkpoint: Path
    run_folder: Path | None  # None: a checkpoint alone


def push(config: PushConfig) -> None:
    files = collect(config)
    if config.dry_run is not None:
        write(files, config)
        return
    upload(files, config)


def collect(config: PushConfig) -> Files:
    """The files to upload. Raises ValueError for a draft that cannot be published."""
    source = find(Path(config.draft))
    if is_adapter(source.checkpoint):
        raise ValueError(f"draft {source.checkpoint} is a LoRA adapter; push what slipstream convert makes of it")
    values = read_json(source.checkpoint / "config.json")
    run = read_json(source.checkpoint / "run.json")
    target = config.target or public_target(values, run)
    if not target:
        print("the draft's target has no name on the hub, so users have to give --target to serve; name it by --target")
    public = with_target(values, target)
    public_run = without_paths(run, frozenset({str(values.get("target"))} - {target}))
    files: Files = {"config.json": encoded(public), "run.json": encoded(public_run)}
    weights = weight_files(source.checkpoint)
    if not weights:
        raise ValueError(f"draft {source.checkpoint} has no model.safetensors; name a complete checkpoint")
    for file in weights:
        read_header(file)  # refuses one that is cut short
    files |= {file.name: file for file in weights}
    if (source.checkpoint / INDEX).exists():
        files[INDEX] = source.checkpoint / INDEX
    lines = [] if source.run_folder is None else read_lines(source.run_folder / "metrics.jsonl")
    lines = [line for line in lines if config.samples or "sample" not in line]
    if lines:
        files["metrics.jsonl"] = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    files["README.md"] = make_card(config, public, public_run, source, target).text().encode()
    return files


def find(path: Path) -> Source:
    """Raises ValueError for a folder that is neither a run with a checkpoint nor a checkpoint."""
    if (path / "config.json").is_file():
        is_of_run = (path.parent / "metrics.jsonl").is_file()
        return Source(path, path.parent if is_of_run else None)
    if (path / "best").is_dir():
        return Source(path / "best", path)
    raise ValueError(
        f"draft {path} has neither best/ nor config.json; name the output folder of a run that has evaluated, or a "
        "checkpoint in it"
    )


def make_card(config: PushConfig, values: Values, run: Any, source: Source, target: str) -> Card:
    kind = speculators_kind(values)
    drafter = str(values.get("drafter", "")) if kind is None else drafter_of_kind(kind)
    if drafter not in TITLES:
        raise ValueError(
            f"draft {source.checkpoint} was not written by training here (drafter in config.json); convert it with "
            "`slipstream convert --layout slipstream` first"
        )
    return Card(
        repo=config.repo,
        drafter=drafter,
        target=target,
        license=config.license or target_license(target, read_json(source.checkpoint / "run.json")),
        values=from_speculators(dict(values)),
        run=run,
        options=run_options(source),
        layout="slipstream" if kind is None else "speculators",
    )


def run_options(source: Source) -> dict[str, Any]:
    """Options of the run, by its newest checkpoint; empty if that is not there."""
    steps = [] if source.run_folder is None else step_folders(source.run_folder)
    if not steps:
        return {}
    saved = read_json(steps[-1] / "state" / "progress.json")
    return {name: without_paths(value) for name, value in saved.get("identity", {}).items()}


def public_target(values: Values, run: Values) -> str:
    """The target's name on the hub; empty for a folder, which run.json of training and of `convert` tells."""
    name = config_target(values)
    return name if may_be_hub_id(name) and "target_path" not in run else ""


def with_target(values: Values, target: str) -> dict[str, Any]:
    public = {**values, "target": target}
    layout = values.get("speculators_config")
    if layout is not None:
        public["speculators_config"] = {**layout, "verifier": {**layout.get("verifier", {}), "name_or_path": target}}
    return public


def target_license(target: str, run: Values) -> str:
    """From the target's README.md or config.json, in its folder or the hub's cache. Raises ValueError if neither says
    it."""
    folder = run.get("target_path")
    for name in ("README.md", "config.json"):
        cached = None if folder or not target else try_to_load_from_cache(target, name)
        file = Path(folder) / name if folder else Path(cached) if isinstance(cached, str) else None
        if file is None or not file.is_file():
            continue
        text = file.read_text(errors="replace")
        if name == "README.md":
            parts = text.split("---", 2)
            text = parts[1] if len(parts) == 3 and not parts[0].strip() else ""
        fields = yaml.safe_load(text)
        if isinstance(fields, dict) and isinstance(fields.get("license"), str):
            return str(fields["license"])
    raise ValueError("license is empty, and the target's files do not say theirs; give one such as apache-2.0")


def without_paths(value: Any, local: frozenset[str] = frozenset()) -> Any:
    """JSON without `target_path`, and with the last part of each path in place of it. Names of the hub stay, except
    those in `local`, which are folders of that form."""

    def last_part(match: re.Match[str]) -> str:
        word = match[0]
        is_public = "://" in word or (may_be_hub_id(word) and word not in local and not Path(word).exists())
        return word if is_public else PurePath(word).name

    if isinstance(value, dict):
        items = {name: item for name, item in value.items() if name != "target_path"}
        return {without_paths(name, local): without_paths(item, local) for name, item in items.items()}
    if isinstance(value, list):
        return [without_paths(item, local) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(("/", "~", "./", "../")) and "{" not in value:  # a path with other marks, too
        return PurePath(value).name
    return PATH.sub(last_part, value)


def encoded(values: Values) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def write(files: Files, config: PushConfig) -> None:
    folder = config.dry_run or ""
    inputs = {"draft": [config.draft]}
    check_output_folder(folder, PUSHED, inputs, overwrite=config.overwrite, option="dry_run")
    with atomic_folder(Path(folder), PUSHED.check) as staged:
        for name, contents in files.items():
            if isinstance(contents, Path):
                shutil.copyfile(contents, staged / name)
            else:
                (staged / name).write_bytes(contents)
    print(f"{folder}: {', '.join(sorted(files))}; nothing was uploaded")


def upload(files: Files, config: PushConfig) -> None:
    """Makes one commit of all files. Raises ValueError if the hub refuses or cannot be reached, and for a repository
    that has files, unless `overwrite` is set."""
    token = get_token()
    if token is None:
        raise ValueError("there is no token of the hub; log in with `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token)
    try:
        check_repository(api, config)
        api.create_repo(config.repo, private=config.private or None, exist_ok=True)
        operations = [CommitOperationAdd(name, contents) for name, contents in files.items()]
        commit = api.create_commit(config.repo, operations, commit_message=f"Upload {PurePath(config.draft).name}")
    except HfHubHTTPError as error:
        raise ValueError(
            f"the hub refuses repo {config.repo} ({first_line(error)}); check the name, and that your token may write "
            "there"
        ) from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"the hub cannot be reached ({first_line(error)}); check the network and run the same command again"
        ) from error
    print(f"{commit.commit_url}: {', '.join(sorted(files))}")


def check_repository(api: HfApi, config: PushConfig) -> None:
    """Raises ValueError for a repository that has files, unless `overwrite` is set."""
    try:
        present = sorted(set(api.list_repo_files(config.repo)) - KEEP)
    except RepositoryNotFoundError:
        return
    if present and not config.overwrite:
        names = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
        raise ValueError(
            f"repo {config.repo} has files ({names}); name another, or add --overwrite to replace those of the same "
            "name"
        )


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
