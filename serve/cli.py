"""`serve --draft ckpt/`: reads the options, then runs the server until Ctrl-C.

serve --draft runs/my-draft                          # the checkpoint names its target
serve --target Qwen/Qwen3-8B --draft none --port 9000

`serve --help` loads neither torch nor the HTTP packages: what needs them is imported where it is used.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, make_dataclass
from types import FrameType
from typing import Any, NoReturn

from slipstream.config import parse, read_options
from slipstream.models.drafts.source import source_of
from slipstream.serve.http.engine_client import EngineClient, EngineError
from slipstream.serve.listener import bind
from slipstream.serve.logs import configure, release_streams, report
from slipstream.serve.options import NoOptions, ServeConfig

DESCRIPTION = (
    "OpenAI-compatible server with speculative decoding. The options of a draft, --drafter.*, are listed by "
    "`serve --draft DRAFT --help`."
)


def main(argv: Sequence[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, end_by)
    argv = sys.argv[1:] if argv is None else argv
    engine = EngineClient()
    try:
        if not {"-h", "--help", "--dry-run"} & set(argv):
            engine.spawn()
        status = run(read_config(argv), engine)
    except KeyboardInterrupt:
        status = 0
    finally:
        engine.kill()
        release_streams()
    raise SystemExit(status)


def end_by(number: int, _: FrameType | None) -> NoReturn:
    """Ends this process at once by a signal. The system ignores one without a handler that is sent to the first process
    of a container."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # as shells tell it


def run(config: ServeConfig, engine: EngineClient) -> int:
    """Serves until a signal or the engine's end; returns the exit status of the process."""
    try:
        config.check_inputs()
        config = config.go_on()
        if config.dry_run:
            from slipstream.serve import dry_run
            from slipstream.serve.http.launch import check_files

            print(dry_run.report(config))
            check_files(config)
            return 0
        configure(config.log_format)
        with config.lock_output():
            listener = bind(config.host, config.port)
            from slipstream.serve.http.launch import serve

            return asyncio.run(serve(config, listener, engine))
    except KeyboardInterrupt:
        return 0
    except (ValueError, OSError, EngineError) as error:
        report(f"serve: error: {error}", config.log_format)
        return 1


def read_config(argv: Sequence[str]) -> ServeConfig:
    """Reads the options; exits with status 2 and one message if one is bad."""
    try:
        draft = find_draft(argv)
        options = options_class(draft)
        drafter_option = next((word for word in argv if word.startswith("--drafter.")), None)
        if drafter_option is not None and draft == ServeConfig().draft:
            raise ValueError(f"{drafter_option.split('=')[0]} needs a draft: add --draft CHECKPOINT")
        values = parse(options, argv, prog="serve", description=DESCRIPTION)
    except (ValueError, OSError) as error:
        print(f"serve: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    shared = {field.name: getattr(values, field.name) for field in fields(ServeConfig)}
    return ServeConfig(**{**shared, "drafter": asdict(values.drafter)})


def options_class(draft: str) -> Any:
    """Returns ServeConfig with `drafter` typed as the Options of this draft's drafter."""
    drafter_options: type = NoOptions
    if draft != ServeConfig().draft:
        from slipstream.serve.drafters.options import options_for

        drafter_options = options_for(source_of(draft))
    drafter = ("drafter", drafter_options)
    return make_dataclass("ServeOptions", [drafter], bases=(ServeConfig,), frozen=True, kw_only=True)


def find_draft(argv: Sequence[str]) -> str:
    """Reads the draft before the other options, since it decides which options there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--draft")
    parser.add_argument("--config", action="append", default=[])
    values, _ = parser.parse_known_args(argv)
    draft = ServeConfig().draft
    for name in values.config:
        draft = read_options(name).get("draft", draft)
        if not isinstance(draft, str):
            raise ValueError(f"draft in {name} is {draft!r}; it must be a checkpoint or the name of a drafter")
    return values.draft or draft


if __name__ == "__main__":
    main()
