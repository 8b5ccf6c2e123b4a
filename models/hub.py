"""Checkpoints from the Hugging Face hub: fetches the small files first, then exactly the weights that will be read."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from slipstream.models.weight_files import INDEX, indexed_names

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def download(name: str, revision: str | None, *, trust_remote_code: bool, weights: bool) -> Path:
    """The local folder of a hub id's files; `trust_remote_code` adds its Python files.

    Weights come as safetensors only. Raises ValueError if the hub can not be reached or refuses.
    """
    code = ("*.py",) if trust_remote_code else ()
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES, *code]))
        if weights:
            _fetch_weights(name, folder)
    except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"checkpoint {name} is not a local folder, and the hub could not be reached ({_reason(error)}); check the "
            "network, or give the path of a folder that holds the checkpoint"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(
            f"checkpoint {name} is not a local folder, and the hub does not give it out ({_reason(error)}); check the "
            "name and the revision, and log in with `hf auth login` if it is private or gated"
        ) from error
    except OSError as error:
        raise ValueError(f"checkpoint {name} could not be downloaded ({_reason(error)})") from error
    return folder


def _fetch_weights(name: str, folder: Path) -> None:
    """The files that `weight_files` will choose, of the commit in whose folder the small files lie."""
    index = folder / INDEX
    choices = [["model.safetensors"], ["model*.safetensors"], ["*.safetensors"]]
    for patterns in [indexed_names(index)] if index.exists() else choices:
        # Subfolders hold other formats (onnx/, original/).
        snapshot_download(name, revision=folder.name, allow_patterns=patterns, ignore_patterns=["*/*"])
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return


def _reason(error: Exception) -> str:
    """The first line of what the hub's client met first; its own advice is about its environment variables."""
    return (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
