"""Tests the memory that is left for the KV cache on the CPU, read from trees such as the kernel's."""

from pathlib import Path
from types import SimpleNamespace

import psutil

from slipstream.serve.engine import memory
from slipstream.serve.engine.host_memory import available_bytes
from slipstream.tests.serve.engine_runs import build_engine
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

FREE = 9_000  # on the machine
V1 = "5:cpu,cpuacct:/job\n4:memory:{path}\n1:name=systemd:/\n"
V1_STAT = "cache 7\nactive_file 1\ntotal_active_file {}\ntotal_inactive_file 3\n"
V2_STAT = "anon 7\nfile 9\nactive_file {}\ninactive_file 3\n"


def write(folder: Path, version: int, limit: int | str, usage: int, cached: int = 0):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text((V1_STAT if version == 1 else V2_STAT).format(cached))


@each_case()
def test_limits_of_containers_count_and_cached_files_do_not(version, path, groups, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    assert available_bytes(tmp_path) == FREE, "without cgroups"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(V1.format(path=path) + "0::/\n" if version == 1 else f"0::{path}\n")
    for name, values in groups.items():
        write(tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "") / name, version, *values)
    assert available_bytes(tmp_path) == expected


def test_the_cache_takes_a_quarter_and_errors_name_what_acts(make_target, monkeypatch):
    """A token of this target takes 2 x 4 layers x 2 heads x 8 x 4 bytes = 512 bytes."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 1000 * 512)
    assert build_engine(make_target("llama"), kv_cache_tokens=None).info.kv_cache_tokens == 1000 // 16 * 16
    with user_error(r"max_model_len, or raise kv_cache_tokens$"):
        build_engine(make_target("llama"), kv_cache_tokens=32, max_model_len=100)
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 15 * 512)
    with user_error(r"a quarter of what is free, .* holds no page .* or set kv_cache_tokens$"):
        build_engine(make_target("llama"), kv_cache_tokens=None)
