"""Says why a draft is accepted badly: `slipstream doctor --draft DRAFT --target TARGET`, or `--live URL`.

Writes a page, prints a table, and exits with status 1 where something is wrong.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from functools import partial
from pathlib import Path

from slipstream.config import run
from slipstream.doctor.live import examine_live, live_text
from slipstream.doctor.options import DoctorConfig
from slipstream.models.files.text import read_key


def examine_and_report(config: DoctorConfig) -> None:
    """A running server is asked without torch, whose import takes seconds."""
    if config.live is not None:
        live = examine_live(config.live, read_key(config.api_key_file))
        print(live_text(live))
        raise SystemExit(int(live.is_wrong))
    from slipstream.doctor.examine import examine
    from slipstream.doctor.report import check_report, print_report, write_report

    check_report(Path(config.output))
    examination = examine(config)
    print_report(examination)
    print(f"\n{write_report(examination, Path(config.output))}")
    if examination.is_wrong:
        raise SystemExit(1)


main = partial(run, examine_and_report, DoctorConfig, "slipstream doctor")

if __name__ == "__main__":
    main()
