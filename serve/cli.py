"""`serve --draft ckpt/`: reads the options, then runs the server until Ctrl-C.

serve --draft runs/my-draft                          # the checkpoint names its target
serve --target Qwen/Qwen3-8B --draft none --port 9000

`serve --help` loads neither torch nor the HTTP packages: what needs them is imported where it is used.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, make_dataclass
from typing import Any

from slipstream.config import parse, read_options
from slipstream.serve.http.engine_client import EngineClient, EngineError
from slipstream.serve.http.listener import bind
from slipstream.serve.logs import configure, release_streams, report
from slipstream.serve.options import NoOptions, ServeConfig

DESCRIPTION = (
    "OpenAI-compatible server with speculative decoding. The options of a draft, --drafter.*, are listed by "
    "`serve --draft DRAFT --help`."
)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    engine = EngineClient()
    if not {"-h", "--help", "--dry-run"} & set(argv):
        engine.spawn()
    try:
        status = run(read_config(argv), engine)
    finally:
        engine.kill()
        release_streams()
    raise SystemExit(status)


def run(config: ServeConfig, engine: EngineClient) -> int:
    """Serves until a signal or the engine's end; the process's exit status."""
    try:
        config.check_inputs()
        if config.dry_run:
            from slipstream.serve import dry_run

            print(dry_run.report(config))
            return 0
        configure(config.log_format)
        listener = bind(config.host, config.port)
        from slipstream.serve.http.launch import serve

        return asyncio.run(serve(config, listener, engine))
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError, EngineError) as error:
        report(f"serve: error: {error}", config.log_format)
        return 1


def read_config(argv: Sequence[str]) -> ServeConfig:
    """Exits with status 2 and one message if an option is bad."""
    try:
        draft = find_draft(argv)
        options = options_class(draft)
        own = next((word for word in argv if word.startswith("--drafter.")), None)
        if own is not None and draft == ServeConfig().draft:
            raise ValueError(f"{own.split('=')[0]} needs a draft: add --draft CHECKPOINT")
        values = parse(options, argv, prog="serve", description=DESCRIPTION)
    except (ValueError, OSError) as error:
        print(f"serve: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    given = {option.name: getattr(values, option.name) for option in fields(ServeConfig)}
    return ServeConfig(**{**given, "drafter": asdict(values.drafter)})


def options_class(draft: str) -> Any:
    """ServeConfig with `drafter` typed as the Options of this draft's drafter."""
    own: type = NoOptions
    if draft != ServeConfig().draft:
        from slipstream.serve.drafters.registry import options_of

        own = options_of(draft)
    drafter = ("drafter", own)
    return make_dataclass("ServeOptions", [drafter], bases=(ServeConfig,), frozen=True, kw_only=True)


def find_draft(argv: Sequence[str]) -> str:
    """The draft, read before the other options, since it decides which there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--draft")
    parser.add_argument("--config", action="append", default=[])
    known, _ = parser.parse_known_args(argv)
    draft = ServeConfig().draft
    for name in known.config:
        draft = read_options(name).get("draft", draft)
        if not isinstance(draft, str):
            raise ValueError(f"draft in {name} is {draft!r}; it must be a checkpoint or the name of a drafter")
    return known.draft or draft


if __name__ == "__main__":
    main()
