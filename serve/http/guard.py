"""API keys of the server, and a warning if a server that others can reach asks for none."""

import hmac
from collections.abc import Iterable
from hashlib import blake2b, sha256

from slipstream.serve.http.limits import ApiError
from slipstream.serve.keys import LONGEST_KEY, VARIABLE, check_states, is_loopback, read_keys
from slipstream.serve.options import ServeConfig

OPEN_PATHS = frozenset(("/health", "/ready"))  # which need no key


class Guard:
    """Holds digests of the keys, so that no log, message or dump of this process shows one."""

    def __init__(self, keys: Iterable[str] = (), digests: Iterable[bytes] = ()) -> None:
        """`digests`: of further keys, by `digest`."""
        self.digests = sorted({*map(digest, keys), *digests})
        self.is_open = not self.digests  # asks for no key

    @classmethod
    def of(cls, config: ServeConfig) -> "Guard":
        """Raises ValueError for a file that cannot be read or holds no key, and if others than this machine could
        change the draft, or ask for states, without a key."""
        keys = read_keys(config)
        check_states(config, keys)  # the engine does, too, but only once it is loaded
        guard = cls(keys)
        if config.draft_folder is not None and guard.is_open and not is_loopback(config.host):
            raise ValueError(
                f"draft_folder is {config.draft_folder}, so clients may change the draft, but host is {config.host}, "
                f"so others may reach this server, and it asks for no API key; set {VARIABLE} or add --api-key-file"
            )
        return guard

    def check(self, path: str, authorization: str | None) -> str:
        """Returns the name of the client: a digest of its key, or empty if there are fewer than two keys to tell
        clients apart. Raises ApiError (401) unless the path is open or the header has one of the keys."""
        if self.is_open or path in OPEN_PATHS:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "this server needs an API key: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        key_digest = digest(key.strip()[:LONGEST_KEY])
        # Compares with all, each in constant time, so that the time reveals nothing about any key.
        if not sum(hmac.compare_digest(key_digest, other) for other in self.digests):
            raise ApiError(401, "the API key is not one of this server's", code="invalid_api_key")
        if len(self.digests) == 1:
            return ""
        # a second digest, not the one that keys are compared by, since the engine stores it
        return blake2b(key_digest, digest_size=16, person=b"client").hexdigest()


def digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def warning(config: ServeConfig, guard: Guard) -> str | None:
    """Returns a warning for a server without keys that others can reach, or None."""
    if is_loopback(config.host) or not guard.is_open:
        return None
    return (
        f"host is {config.host}, so others may reach this server, and it asks for no API key; set {VARIABLE} or add "
        "--api-key-file, or put a proxy in front that checks keys"
    )
