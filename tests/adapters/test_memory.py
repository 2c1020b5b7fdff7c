"""Reading a machine's memory, its kernel log, its GPU's names and its page cache, from files and from the real ones."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from vllm_supervisor.adapters import kernel_log, last_ditch, nvidia, page_cache
from vllm_supervisor.adapters.kernel_log import KernelLog
from vllm_supervisor.adapters.kill_list import KillList
from vllm_supervisor.adapters.memory import MemoryReader
from vllm_supervisor.core.gpu_cards import Card
from vllm_supervisor.core.memory_mode import Gpu
from vllm_supervisor.core.proc import ProcessId, parse_stat

MEMINFO = """MemTotal:       127601956 kB
MemFree:         3000000 kB
MemAvailable:   30000000 kB
Buffers:           10000 kB
Cached:         27000000 kB
SwapCached:            7 kB
SwapTotal:             0 kB
SwapFree:              5 kB
"""


def machine(home: Path, meminfo: str = MEMINFO) -> Path:
    """Make a /proc of files."""
    (home / "pressure").mkdir()
    (home / "meminfo").write_text(meminfo)
    (home / "pressure/memory").write_text(
        "some avg10=71.20 avg60=1.00 avg300=0.00 total=1\nfull avg10=64.50 avg60=1.00 avg300=0.00 total=1\n"
    )
    (home / "vmstat").write_text("nr_free_pages 5\nxoom_kill 9\noom_kill 3\nnr_last 1\n")
    return home


def test_every_number_comes_from_its_line(tmp_path: Path) -> None:
    """MemTotal to SwapFree in bytes, PSI's full avg10, the count of OOM kills; similar names do not confuse it."""
    seen = MemoryReader(machine(tmp_path)).read(driver_out=2)
    assert seen is not None
    kib = 1024
    assert (seen.total, seen.available, seen.free) == (127601956 * kib, 30000000 * kib, 3000000 * kib)
    assert (seen.cached, seen.swap_free, seen.swap_total) == (27000000 * kib, 5 * kib, 0)
    assert (seen.stalled, seen.oom_kills, seen.driver_out) == (64.5, 3, 2)


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    """Files that are not the kernel's may be exchanged between two looks."""
    reader = MemoryReader(machine(tmp_path))
    reader.read()
    (tmp_path / "new").write_text(MEMINFO.replace("30000000", "20000000"))
    (tmp_path / "new").replace(tmp_path / "meminfo")
    seen = reader.read()
    assert seen is not None
    assert seen.available == 20000000 * 1024


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 5 kB\n", "MemTotal:"])
def test_half_a_file_is_no_look(tmp_path: Path, meminfo: str) -> None:
    """A look without total or available is none; it never raises."""
    assert MemoryReader(machine(tmp_path, meminfo)).read() is None


def test_a_machine_without_pressure_or_files_gives_what_there_is(tmp_path: Path) -> None:
    """A kernel without PSI still shows its memory; no meminfo at all is no look."""
    assert MemoryReader(tmp_path / "nothing").read() is None
    (tmp_path / "meminfo").write_text(MEMINFO)
    seen = MemoryReader(tmp_path).read()
    assert seen is not None
    assert (seen.stalled, seen.oom_kills) == (None, None)


def test_the_real_machine_can_be_read() -> None:
    """The kernel's own files, through descriptors that stay open."""
    reader = MemoryReader()
    first, second = reader.read(), reader.read(all_of_it=False)
    assert first is not None
    assert second is not None
    assert 0 < first.available <= first.total == second.total
    assert first.oom_kills == second.oom_kills is not None
    reader.close()


def test_a_look_costs_less_than_half_a_percent_of_a_core() -> None:
    """At four looks a second that is 1.25 ms of CPU each, with the kernel log read as well."""
    reader, log = MemoryReader(), KernelLog()
    began = time.thread_time()
    for look in range(200):
        assert reader.read(driver_out=log.look(), all_of_it=look % 4 == 0) is not None
    assert (time.thread_time() - began) / 200 < 0.005 / 4
    reader.close()
    log.close()


def test_the_kernel_log_begins_at_its_end_and_keeps_what_matters(tmp_path: Path) -> None:
    """Lines of before do not count, half a line waits for its rest, others' lines are not kept."""
    path = tmp_path / "kmsg"
    path.write_text("3,1,1,-;NVRM: NV_ERR_NO_MEMORY of before\n")
    log = KernelLog(path)
    assert log.look() == 0
    with path.open("a") as file:
        file.write(
            "6,2,2,-;usb 1-1: new device\n3,3,3,-;NVRM: Xid (PCI:0000:01:00): 31, pid=7\n3,4,4,-;NVRM: [NV_ERR_NO"
        )
    assert log.look() == 0
    with path.open("a") as file:
        file.write("_MEMORY] (0x51)\n")
    assert log.look() == 1
    said = ["NVRM: Xid (PCI:0000:01:00): 31, pid=7", "NVRM: [NV_ERR_NO_MEMORY] (0x51)"]
    assert [line.text for line in log.lines] == said
    assert [0 <= time.monotonic() - line.at < 60 for line in log.lines] == [True, True]
    assert [line.text for line in log.take()] == said
    assert log.take() == []
    log.close()


def test_a_programs_words_in_the_real_kernel_log_are_not_the_kernels() -> None:
    """What root writes to /dev/kmsg comes back with a facility, and says nothing; the log stays readable."""
    log = KernelLog()
    if log.problem:
        assert "cannot be read" in log.problem
        return
    with open("/dev/kmsg", "w", encoding="ascii") as file:  # noqa: PTH123 - a device
        file.write("<3>NVRM: Xid (PCI:0000:01:00): 79, [NV_ERR_NO_MEMORY] test of vllm-supervisor")
    assert (log.look(), log.take(), log.problem) == (0, [], "")
    log.close()


@pytest.mark.parametrize("kind", ["fifo", "null", "directory"])
def test_something_else_in_the_place_of_the_kernel_log_is_a_sentence(tmp_path: Path, kind: str) -> None:
    """Containers put /dev/null, a console or a pipe there: nothing is read from it, and it is said."""
    path = {"fifo": tmp_path / "pipe", "null": Path("/dev/null"), "directory": tmp_path}[kind]
    if kind == "fifo":
        os.mkfifo(path)
    log = KernelLog(path)
    assert "is not the kernel's log here" in log.problem
    assert (log.look(), log.take()) == (0, [])


def test_records_lost_to_an_overrun_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPIPE in the middle is followed by what is still there; one look reads no more than its share."""
    path = tmp_path / "kmsg"
    path.write_text("")
    log = KernelLog(path)
    overrun, end = OSError(errno.EPIPE, "Broken pipe"), BlockingIOError()
    answers: list[bytes | OSError] = [overrun, b"3,9,9,-;NVRM: [NV_ERR_NO_MEMORY]\n", overrun, end]

    def read(_fd: int, _size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(kernel_log.os, "read", read)
    assert (log.look(), log.problem, answers) == (1, "", [])
    monkeypatch.setattr(kernel_log.os, "read", lambda _fd, _size: b"3,9,9,-;NVRM: [NV_ERR_NO_MEMORY]\n")
    assert log.look() == 2001
    assert len(log.lines) == 100
    monkeypatch.undo()
    log.close()


def test_a_kernel_log_that_may_not_be_read_is_a_sentence(tmp_path: Path) -> None:
    """No log is no fault."""
    log = KernelLog(tmp_path / "none")
    assert log.look() == 0
    assert "cannot be read: No such file" in log.problem


def test_the_kill_list_kills_who_it_knows_and_nobody_else() -> None:
    """Two processes aimed at die by one call; one that is not on the list, or whose start time differs, lives."""
    script = "import time; print('ready', flush=True); time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for child in children:
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
        ids = [parse_stat(Path(f"/proc/{child.pid}/stat").read_bytes()).id for child in children]
        killer = KillList()
        killer.begin(3, ids[0], None)
        wrong = ProcessId(ids[2].pid, ids[2].start_ticks - 1)
        killer.aim([ids[0], ids[1], wrong, ProcessId(2**22 + 1, 1)])
        assert (killer.incarnation, killer.fire()) == (3, 2)
        assert [children[0].wait(5), children[1].wait(5)] == [-9, -9]
        assert [children[2].poll(), children[3].poll()] == [None, None]
        assert killer.fire() == 0
        killer.aim([ids[3]])
        killer.clear()
        assert (killer.incarnation, killer.fire(), children[3].poll()) == (0, 0, None)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout
            child.stdout.close()


def test_a_killed_session_gets_the_processor_to_end_with() -> None:
    """Where the kernel shares the processor between sessions, one that had less than others has not when it is to end."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        share = Path(f"/proc/{child.pid}/autogroup")
        share.write_text("5")
        killer = KillList()
        killer.begin(1, parse_stat(Path(f"/proc/{child.pid}/stat").read_bytes()).id, None)
        assert killer.fire() == 1
        deadline = time.monotonic() + 5.0
        while int(share.read_text().split()[-1]) > 0:  # the kernel takes one such word in a tenth of a second
            assert time.monotonic() < deadline
            killer.fire()
        killer.clear()


def test_gpu_and_board_names_come_from_proc(tmp_path: Path) -> None:
    """Each GPU's Model line, and a board of NVIDIA's; a machine without either has no names."""
    assert nvidia.names(tmp_path) == ()
    gpu = tmp_path / "driver/nvidia/gpus/000f:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA GB10\nIRQ:   \t\t 500\n")
    (tmp_path / "device-tree").mkdir()
    (tmp_path / "device-tree/model").write_bytes(b"NVIDIA Jetson AGX Thor Developer Kit\0")
    assert nvidia.names(tmp_path) == ("NVIDIA GB10", "NVIDIA Jetson AGX Thor Developer Kit")


def test_cards_and_their_device_files(tmp_path: Path) -> None:
    """Address, minor, UUID and model of each card; a directory that is no address is none; what a process holds open counts."""
    for name, minor in (("0000:41:00.0", 1), ("0000:01:00.0", 0), ("odd", 2)):
        gpu = tmp_path / f"driver/nvidia/gpus/{name}"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(
            f"Model: \t\t NVIDIA X\nGPU UUID: \t GPU-{minor}\nBus Location: \t {name}\nDevice Minor: \t {minor}\n"
        )
    assert nvidia.cards(tmp_path) == (
        Card("0000:01:00", 0, "GPU-0", "NVIDIA X"),
        Card("0000:41:00", 1, "GPU-1", "NVIDIA X"),
    )
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (dev / name).touch()
    assert nvidia.present(dev) == {0, 10}
    with (dev / "nvidia10").open(), (dev / "nvidiactl").open():
        assert nvidia.opened([os.getpid(), 2**22 + 1]) == {10}
    assert nvidia.opened([os.getpid()]) == set()


def test_what_nvidia_smi_answers_is_kept_apart() -> None:
    """[N/A] and [Not Supported] are no memory, other words a reason; a comma in a name is part of it."""
    printed = (
        "NVIDIA GB10, [N/A], [N/A]\nNVIDIA, odd, 24564, 1\nX, [Not Supported], [Unknown Error]\n"
        "Y, [GPU is lost], [GPU is lost]\nZ, 0, 0\nno line\n"
    )
    assert nvidia.parse_smi(printed).gpus == (
        Gpu("NVIDIA GB10"),
        Gpu("NVIDIA, odd", 24564 << 20, 1 << 20),
        Gpu("X"),
        Gpu("Y", "GPU is lost"),
        Gpu("Z", "0", 0),
    )


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (SimpleNamespace(total=24 << 30, used=1), 24 << 30),
        (RuntimeError("Not Supported"), None),
        (RuntimeError("GPU is lost"), "GPU is lost"),
        (RuntimeError("Unknown Error"), "Unknown Error"),
        (RuntimeError("Insufficient Permissions"), "Insufficient Permissions"),
        (SimpleNamespace(total=0, used=0), "0"),
    ],
)
def test_nvml_is_asked_defensively(monkeypatch: pytest.MonkeyPatch, memory: object, expected: int | str | None) -> None:
    """Memory that NVML does not support is None, another refusal its words; names may be bytes."""
    nvml = ModuleType("pynvml")

    def get_memory(_handle: object) -> object:
        if isinstance(memory, RuntimeError):
            raise memory
        return memory

    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 1
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda _handle: b"NVIDIA GB10"
    nvml.nvmlDeviceGetMemoryInfo = get_memory
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = nvidia.by_nvml()
    assert facts.gpus is not None
    assert [(gpu.name, gpu.memory) for gpu in facts.gpus] == [("NVIDIA GB10", expected)]

    def lost(_index: int) -> object:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", lost)
    assert nvidia.by_nvml().gpus == (Gpu("GPU 0", "GPU is lost"),)

    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    nvml.nvmlInit = fail
    assert nvidia.by_nvml().problem == "Driver Not Loaded"


def test_the_gpu_memory_of_each_process(tmp_path: Path) -> None:
    """Summed over cards by pid; [N/A] is left out; where the driver shows no GPU nobody is asked."""
    printed = "4089, 1024\n4089, 512\n77, [N/A]\n[Insufficient Permissions], 5\n\nno line\n"
    assert nvidia.parse_processes(printed) == {4089: 1536 << 20}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 4089, 3\n")
    tool.chmod(0o700)
    search = f"{tmp_path}:{os.defpath}"
    assert nvidia.process_memory(search, tmp_path) == {}
    gpu = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: X\n")
    assert nvidia.process_memory(search, tmp_path) == {4089: 3 << 20}
    assert nvidia.process_memory(str(tmp_path / "none"), tmp_path) == {}


def test_a_driver_that_cannot_be_asked_is_a_sentence(tmp_path: Path) -> None:
    """No package and no nvidia-smi, or one that fails: the facts say so."""
    assert "not installed" in nvidia.by_nvml("no_such_package").problem
    assert "nvidia-smi" in nvidia.by_smi(str(tmp_path)).problem
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o700)
    assert nvidia.by_smi(f"{tmp_path}:{os.defpath}").problem == "nvidia-smi ended with status 9"


def test_a_models_files_are_found_where_they_are(tmp_path: Path) -> None:
    """A directory as it is; a name at the hub in its cache; anything else nowhere."""
    blobs = tmp_path / "hub/models--org--tiny/blobs"
    blobs.mkdir(parents=True)
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert page_cache.model_directory("org/tiny", environ) == blobs
    assert page_cache.model_directory("org/tiny", {"HF_HOME": str(tmp_path)}) == blobs
    assert page_cache.model_directory(str(tmp_path), {}) == tmp_path
    assert page_cache.model_directory("org/other", environ) is None
    assert page_cache.model_directory("", environ) is None


def test_evicting_names_the_files_and_leaves_them_whole(tmp_path: Path) -> None:
    """Links are followed, sizes are counted, nothing that blocks is opened, and the content is as before."""
    (tmp_path / "a.safetensors").write_bytes(b"x" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "pipe")
    files, size = page_cache.evict(tmp_path)
    assert (files, size) == (2, 10000)
    assert (tmp_path / "a.safetensors").read_bytes() == b"x" * 5000


def test_dropping_all_caches_writes_where_told_or_says_why_not(tmp_path: Path) -> None:
    """A 1 to sys/vm/drop_caches; without the right to, a sentence."""
    assert "cannot be written" in page_cache.drop_all(tmp_path)
    (tmp_path / "sys/vm").mkdir(parents=True)
    assert page_cache.drop_all(tmp_path) == ""
    assert (tmp_path / "sys/vm/drop_caches").read_text() == "1\n"


def test_the_engine_is_preferred_and_we_are_spared_where_that_is_allowed() -> None:
    """Raising a child's score always works; lowering ours needs CAP_SYS_RESOURCE, and without it a sentence says so."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert last_ditch.prefer_engine(child.pid) == ""
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "800\n"
    finally:
        child.kill()
        child.wait()
    own = Path("/proc/self/oom_score_adj")
    before = own.read_text()
    said = last_ditch.spare_us()
    capabilities = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:")
    )
    if int(capabilities.split()[1], 16) >> 24 & 1:  # CAP_SYS_RESOURCE
        assert (said, own.read_text()) == ("", "-500\n")
        own.write_text(before)
    else:
        assert "our oom_score_adj cannot be set to -500 (Permission denied)" in said
        assert own.read_text() == before
    assert "the engine's oom_score_adj" in last_ditch.prefer_engine(2**22 + 1)


def test_locking_memory_works_or_says_what_is_missing() -> None:
    """Tried in a process of its own: locked pages show in its status, or the sentence names the limit."""
    script = (
        "from vllm_supervisor.adapters import last_ditch\n"
        "import resource\n"
        "print(last_ditch.lock_memory())\n"
        "print([l for l in open('/proc/self/status') if l.startswith('VmLck')][0].split()[1])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(last_ditch.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    said, locked = done.stdout.splitlines()
    assert (int(locked) > 0) is (said == "")
    assert said == "" or "LimitMEMLOCK=infinity" in said
