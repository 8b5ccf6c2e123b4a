"""A capture from engines holds what the target in process gives, and continues where an engine was lost."""

from pathlib import Path

import pytest

from slipstream.data_tools.capture_states import main
from slipstream.models.files.state_store import StateStore
from slipstream.models.states.address import Address
from slipstream.tests.state_engines import StateEngine, assert_same_states


def options(target: Path, data: Path, output: Path, *words: str) -> list[str]:
    fixed = ["--max-length=40", "--batch-tokens=100", "--shard-gb=6e-5", "--yes"]
    return [f"--target={target}", f"--data={data}", f"--output={output}", *fixed, *words]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_a_capture_from_an_engine(target_path, data_path, tmp_path, dtype):
    engine = StateEngine(target_path, Address("", path=str(tmp_path / "engine")))
    words = ["--layers", "2", "0", "--last-hidden", f"--dtype={dtype}"]
    main(options(target_path, data_path, tmp_path / "local", *words))
    main(options(target_path, data_path, tmp_path / "remote", *words, f"--endpoint={engine.address}"))
    engine.close()
    main(options(target_path, data_path, tmp_path / "remote", *words, "--verify"))  # the same capture
    local = StateStore(tmp_path / "local")
    remote = StateStore(tmp_path / "remote")
    tolerance = {"fp32": 1e-5, "bf16": 2**-7, "fp8": 2**-3}[dtype]
    assert local.index.to_json() | {"command": ""} == remote.index.to_json() | {"command": ""}
    assert_same_states(remote, local, tolerance)


def test_another_target_is_refused(target_path, gemma_path, data_path, tmp_path, capsys):
    engine = StateEngine(gemma_path, Address("", path=str(tmp_path / "engine")))
    with pytest.raises(SystemExit):
        main(options(target_path, data_path, tmp_path / "remote", f"--endpoint={engine.address}"))
    engine.close()
    assert "has another target" in capsys.readouterr().err
