"""API keys of the options or the environment, and addresses that other machines cannot reach."""

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.models.states.address import Address
from slipstream.serve.options import ServeConfig

VARIABLE = "SLIPSTREAM_API_KEY"
LONGEST_KEY = 4096  # characters


def read_keys(config: ServeConfig) -> list[str]:
    """Reads the keys from the options, or from the environment if the options name none."""
    keys = [config.api_key] if config.api_key is not None else []
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_key_file {config.api_key_file} cannot be read: {error}") from error
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise ValueError(f"api_key_file {config.api_key_file} holds no key; write one on each line")
        keys += file_keys
    if not keys and os.environ.get(VARIABLE):
        keys = [os.environ[VARIABLE]]
    for key in keys:
        if not (key.isascii() and key.isprintable() and key == key.strip() and 0 < len(key) <= LONGEST_KEY):
            raise ValueError(
                "an API key must be printable ASCII without spaces around it, and not empty; choose another"
            )
    return keys


def check_states(config: ServeConfig, keys: Sequence[str]) -> None:
    """Raises ValueError if other machines could ask for states without a key."""
    address = None if config.states is None else Address.parse("states", config.states)
    if not (address is None or keys or address.path or is_loopback(address.host)):
        raise ValueError(
            f"states is {config.states}, so other machines may ask for states, and there is no API key; add "
            "--api-key-file, or choose 127.0.0.1 or the path of a socket"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
