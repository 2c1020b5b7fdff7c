"""The beacon's writer and reader against each other, with a stand-in for vLLM's scheduler."""

import ast
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_supervisor.adapters.beacon import PLUGIN_DIR, BeaconReader, environment
from vllm_supervisor.beacon import vsup_beacon
from vllm_supervisor.core.samples import BeaconSample, EventKind


class Output:
    """What vLLM's `schedule` returns, as far as the beacon looks."""

    def __init__(self, tokens: dict[str, int], *, new: tuple[str, ...] = (), outputs: tuple[int, ...] = ()) -> None:
        self.num_scheduled_tokens = tokens
        self.total_num_scheduled_tokens = sum(tokens.values())
        self.scheduled_new_reqs = list(new)
        self.scheduled_cached_reqs = SimpleNamespace(num_output_tokens=list(outputs), resumed_req_ids=set())


def scheduler_module() -> types.ModuleType:
    """Make a module that holds a class of the shape of vLLM's Scheduler."""

    class Scheduler:
        def __init__(self, index: int = 0) -> None:
            self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=index))
            self.running: list[object] = []
            self.waiting: list[object] = []
            self.next: list[Output] = []

        def get_request_counts(self) -> tuple[int, int]:
            return len(self.running), len(self.waiting)

        def schedule(self, throttle: bool = False) -> Output:
            return self.next.pop(0)

        def update_from_output(self, output: Output, model_output: object) -> str:
            return "outputs"

        def add_request(self, request: SimpleNamespace) -> None:
            self.waiting.append(request)

        def _free_request(self, request: SimpleNamespace, delay: bool = False) -> tuple[None, None]:
            return None, None

        def set_pause_state(self, state: SimpleNamespace) -> None:
            pass

    module = types.ModuleType(vsup_beacon._MODULE)
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    return module


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[BeaconReader]:
    """Read the beacons of a directory of this test."""
    reader = BeaconReader(tmp_path)
    yield reader
    reader.close()


def wrapped(tmp_path: Path, index: int = 0) -> object:
    """Make a scheduler that reports to `tmp_path`."""
    module = scheduler_module()
    vsup_beacon._wrap(module, str(tmp_path))
    return module.Scheduler(index)


def only(reader: BeaconReader) -> BeaconSample:
    """Return the one sample there is."""
    (sample,) = reader.read()
    return sample


def test_a_step_is_seen_while_it_is_open_and_after(tmp_path: Path, reader: BeaconReader) -> None:
    """An open step shows its tokens and whether it computes prompts; an ended one counts as work."""
    scheduler = wrapped(tmp_path, index=3)
    before = only(reader)
    assert (before.engine, before.pid, before.begun, before.in_step) == ("3", os.getpid(), 0, False)
    scheduler.next = [Output({"a": 128}, new=("a",))]
    output = scheduler.schedule()
    opened = only(reader)
    assert (opened.begun, opened.ended, opened.open_tokens, opened.open_prefill) == (1, 0, 128, True)
    assert opened.in_step
    assert not opened.in_decode
    assert scheduler.update_from_output(output, None) == "outputs"
    ended = only(reader)
    assert (ended.ended, ended.worked, ended.tokens, ended.open_tokens, ended.in_step) == (1, 1, 128, 0, False)
    assert before.changed_at < opened.changed_at < ended.changed_at
    assert ended.worked_at == ended.changed_at


def test_several_open_steps_end_in_the_order_they_began(tmp_path: Path, reader: BeaconReader) -> None:
    """With a batch queue the open tokens are those of all open steps, and the oldest one ends first."""
    scheduler = wrapped(tmp_path)
    scheduler.next = [Output({"a": 100}, new=("a",)), Output({"a": 1}, outputs=(1,))]
    first, second = scheduler.schedule(), scheduler.schedule()
    both = only(reader)
    assert (both.begun, both.ended, both.open_tokens, both.open_prefill) == (2, 0, 101, True)
    scheduler.update_from_output(first, None)
    one = only(reader)
    assert (one.ended, one.tokens, one.open_tokens, one.open_prefill, one.in_decode) == (1, 100, 1, False, True)
    assert one.open_since == one.changed_at
    scheduler.update_from_output(second, None)
    assert only(reader).open_tokens == 0


def test_an_empty_step_is_life_and_not_work(tmp_path: Path, reader: BeaconReader) -> None:
    """A step with no tokens moves the loop's counts and never the work's."""
    scheduler = wrapped(tmp_path)
    start = only(reader).worked_at
    scheduler.next = [Output({})]
    scheduler.update_from_output(scheduler.schedule(), None)
    sample = only(reader)
    assert (sample.begun, sample.ended, sample.worked, sample.worked_at) == (1, 1, 0, start)
    assert sample.changed_at > start


@pytest.mark.parametrize(
    ("output", "prefill"),
    [
        (Output({"a": 1, "b": 1}, outputs=(4, 9)), False),
        (Output({"a": 1}, new=("a",)), True),
        (Output({"a": 128, "b": 1}, outputs=(0, 9)), True),
        (Output({"a": 4, "b": 4}, outputs=(7, 9)), False),  # speculative decoding
    ],
)
def test_prefill_is_told_from_decode(output: Output, prefill: bool) -> None:
    """New requests and chunks without an output yet are prompts; several tokens with outputs are speculation."""
    assert vsup_beacon.has_prefill(output, output.total_num_scheduled_tokens) is prefill


def test_request_events_come_in_order(tmp_path: Path, reader: BeaconReader) -> None:
    """A request is seen to arrive and to leave, with vLLM's status and the number of tokens."""
    scheduler = wrapped(tmp_path)
    request = SimpleNamespace(
        request_id="cmpl-led-003-0-ad3c712f", status=SimpleNamespace(name="FINISHED_ABORTED"), num_output_tokens=7
    )
    reader.read()
    scheduler.add_request(request)
    assert only(reader).waiting == 1
    scheduler._free_request(request)
    added, finished = reader.events()
    assert (added.kind, added.id) == (EventKind.ADDED, "cmpl-led-003-0-ad3c712f")
    assert (finished.kind, finished.status, finished.output_tokens) == (EventKind.FINISHED, "FINISHED_ABORTED", 7)
    assert reader.events() == []


def test_the_last_words_of_a_writer_that_died_are_heard(tmp_path: Path, reader: BeaconReader) -> None:
    """What a process reported before it was killed is given out after its death as well, once."""
    program = (
        "import os, sys; from vllm_supervisor.beacon.vsup_beacon import FINISHED, Beacon\n"
        "beacon = Beacon(sys.argv[1], 0); print('ready', flush=True); sys.stdin.read(1)\n"
        "beacon.event(FINISHED, 'chatcmpl-a-01234567', 'FINISHED_ABORTED', 3, (0, 0)); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"ready\n"
        assert len(reader.read()) == 1
        writer.communicate(b"x")
    assert reader.read() == ()
    assert [(event.id, event.status) for event in reader.events()] == [("chatcmpl-a-01234567", "FINISHED_ABORTED")]
    assert reader.events() == []


def test_lost_events_are_counted(tmp_path: Path, reader: BeaconReader) -> None:
    """A reader that comes too late is told how many events it missed, and reads on behind them."""
    beacon = vsup_beacon.Beacon(str(tmp_path), 0)
    reader.read()
    total = vsup_beacon.RING_LENGTH + 100
    for number in range(total):
        beacon.event(vsup_beacon.ADDED, f"r{number}", "", 0, (0, 0))
    seen = []
    while batch := reader.events():
        seen += batch
    assert reader.lost_events == 100
    assert [event.id for event in seen] == [f"r{number}" for number in range(100, total)]


def test_a_torn_record_leaves_the_one_before(tmp_path: Path, reader: BeaconReader) -> None:
    """A writer stopped in the middle of a record costs that record and nothing else."""
    beacon = vsup_beacon.Beacon(str(tmp_path), 0)
    beacon.begun(5, False, (1, 0))
    beacon.ended((1, 0))
    slot = vsup_beacon.LIVE_AT + (beacon._seq & 1) * vsup_beacon.SLOT_SIZE
    beacon._map[slot + 8] ^= 0xFF
    assert only(reader).ended == 0
    beacon.begun(5, False, (1, 0))
    assert only(reader).begun == 2


def test_files_that_are_not_ours_are_ignored(tmp_path: Path, reader: BeaconReader) -> None:
    """Wrong size, wrong layout, a dead writer and a symbolic link are no beacons."""
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = int(dead.stdout)
    whole = bytearray(vsup_beacon.FILE_SIZE)
    (tmp_path / "engine-1.beacon").write_bytes(b"short")
    (tmp_path / "engine-2.beacon").write_bytes(whole)
    vsup_beacon.HEADER.pack_into(whole, 0, vsup_beacon.MAGIC, pid, 0, 0.0)
    (tmp_path / f"engine-{pid}.beacon").write_bytes(whole)
    vsup_beacon.HEADER.pack_into(whole, 0, vsup_beacon.MAGIC, os.getpid(), 0, 0.0)
    (tmp_path / "elsewhere").write_bytes(whole)
    (tmp_path / f"engine-{os.getpid()}.beacon").symlink_to(tmp_path / "elsewhere")
    assert reader.read() == ()


@pytest.mark.parametrize("size", [0, vsup_beacon.LIVE_AT + 60, vsup_beacon.RING_AT])
def test_a_file_that_is_cut_short_while_it_is_read_says_nothing(tmp_path: Path, size: int) -> None:
    """Whoever cuts it costs the reports in it and nothing else; what is left of it is still read."""
    (tmp_path / "engine").mkdir()
    scheduler = wrapped(tmp_path / "engine")
    scheduler.next = [Output({"a": 1}, outputs=(1,))]
    scheduler.schedule()
    [written] = (tmp_path / "engine").iterdir()
    path = tmp_path / written.name
    path.write_bytes(written.read_bytes())
    reader = BeaconReader(tmp_path)
    assert len(reader.read()) == 1
    os.truncate(path, size)
    assert len(reader.read()) == (size == vsup_beacon.RING_AT)
    assert reader.events() == []
    reader.close()


def test_a_directory_that_is_not_there_holds_no_beacon(tmp_path: Path) -> None:
    """Before the engine has written anything there is nothing to read, and nothing to complain about."""
    assert BeaconReader(tmp_path / "later").read() == ()


def test_the_file_is_private_and_whole(tmp_path: Path) -> None:
    """The file has mode 0600 and all its blocks, so that a full file system cannot kill the engine later."""
    beacon = vsup_beacon.Beacon(str(tmp_path), 0)
    facts = beacon.path.stat()
    assert facts.st_mode & 0o777 == 0o600
    assert facts.st_blocks * 512 >= vsup_beacon.FILE_SIZE
    assert [path.name for path in tmp_path.iterdir()] == [beacon.path.name]


def test_a_fault_of_ours_ends_the_reports_and_nothing_else(tmp_path: Path, reader: BeaconReader) -> None:
    """When the scheduler's results look different at run time the engine goes on, and the file says it is stale."""
    scheduler = wrapped(tmp_path)
    strange = SimpleNamespace()
    scheduler.next = [strange, strange]
    assert scheduler.schedule() is strange
    assert scheduler.schedule() is strange
    assert reader.read() == ()
    assert reader.faults == 1


@pytest.mark.parametrize("missing", ["schedule", "update_from_output", "add_request", "_free_request"])
def test_a_scheduler_that_looks_different_is_left_alone(tmp_path: Path, missing: str) -> None:
    """A class without one of the methods we need is not touched at all."""
    module = scheduler_module()
    delattr(module.Scheduler, missing)
    before = dict(vars(module.Scheduler))
    vsup_beacon._wrap(module, str(tmp_path))
    assert dict(vars(module.Scheduler)) == before


def test_wrapping_twice_counts_once(tmp_path: Path, reader: BeaconReader) -> None:
    """Plugins may be loaded several times in one process; a step is still one step."""
    module = scheduler_module()
    for _ in range(2):
        vsup_beacon._wrap(module, str(tmp_path))
    scheduler = module.Scheduler()
    scheduler.next = [Output({"a": 1}, outputs=(1,))]
    scheduler.schedule()
    assert only(reader).begun == 1


def test_an_unwritable_directory_costs_the_beacon_and_not_the_engine(tmp_path: Path) -> None:
    """An engine whose beacon cannot be written starts all the same."""
    scheduler = wrapped(tmp_path / "nowhere")
    scheduler.next = [Output({"a": 1})]
    assert scheduler.schedule() is not None


def test_a_session_that_waits_for_its_client_is_no_demand(tmp_path: Path, reader: BeaconReader) -> None:
    """A streaming session between two inputs stands in vLLM's waiting queue, and has nothing to be computed."""
    scheduler = wrapped(tmp_path)
    scheduler.num_waiting_for_streaming_input = 1
    scheduler.add_request(SimpleNamespace(request_id="a"))
    assert only(reader).waiting == 0
    scheduler.add_request(SimpleNamespace(request_id="b"))
    assert only(reader).waiting == 1


def test_an_operators_pause_is_seen(tmp_path: Path, reader: BeaconReader) -> None:
    """Pausing the scheduler, which no metric shows, is in the sample."""
    scheduler = wrapped(tmp_path)
    assert only(reader).paused is None
    scheduler.set_pause_state(SimpleNamespace(name="PAUSED_ALL"))
    assert only(reader).paused is True
    scheduler.set_pause_state(SimpleNamespace(name="UNPAUSED"))
    assert only(reader).paused is False


def test_the_engines_environment_keeps_what_the_user_set() -> None:
    """Our directory goes before the user's own PYTHONPATH, and our name joins VLLM_PLUGINS only where it is set."""
    assert environment(Path("/run/b"), {}) == {"VSUP_BEACON_DIR": "/run/b", "PYTHONPATH": str(PLUGIN_DIR)}
    added = environment(Path("/run/b"), {"PYTHONPATH": "/a:/b", "VLLM_PLUGINS": "theirs"})
    assert added["PYTHONPATH"] == f"{PLUGIN_DIR}:/a:/b"
    assert added["VLLM_PLUGINS"] == "theirs,vsup_beacon"
    assert environment(Path("/run/b"), {"VLLM_PLUGINS": ""})["VLLM_PLUGINS"] == "vsup_beacon"
    assert environment(Path("/run/b"), {"VLLM_PLUGINS": "vsup_beacon"})["VLLM_PLUGINS"] == "vsup_beacon"


FAKE_VLLM = """
import importlib.metadata, sys
sys.dont_write_bytecode = True
for entry in importlib.metadata.entry_points(group="vllm.general_plugins") if sys.version_info >= (3, 10) else ():
    entry.load()()
assert "vllm.v1.core.sched.scheduler" not in sys.modules
from vllm.v1.core.sched.scheduler import Scheduler
print(getattr(Scheduler, "_vsup_wrapped", False), sys.meta_path[0].__class__.__name__)
"""


@pytest.mark.parametrize(("told", "answer"), [(True, "True"), (False, "False")])
def test_the_plugin_is_found_from_its_bare_directory(tmp_path: Path, told: bool, answer: str) -> None:
    """An interpreter with our directory on PYTHONPATH finds the plugin, and wraps the module only when it is imported."""
    package = tmp_path / "vllm" / "v1" / "core" / "sched"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:3]):
        (folder / "__init__.py").touch()
    (package / "scheduler.py").write_text(
        "class Scheduler:\n"
        + "".join(
            f"    def {name}(self): ...\n"
            for name in ("schedule", "update_from_output", "add_request", "_free_request", "get_request_counts")
        )
    )
    env = {"PATH": os.environ["PATH"]} | environment(tmp_path, {"PYTHONPATH": str(tmp_path)})
    if not told:
        del env["VSUP_BEACON_DIR"]
    done = subprocess.run([sys.executable, "-c", FAKE_VLLM], env=env, capture_output=True, check=False, text=True)
    assert done.stderr == ""
    assert done.stdout.split()[0] == answer
    assert done.stdout.split()[1] != "_Watch"


def test_the_plugin_is_readable_by_every_python_vllm_runs_on() -> None:
    """The plugin's syntax is that of Python 3.9, and it imports nothing but the standard library."""
    tree = ast.parse(Path(vsup_beacon.__file__).read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= sys.stdlib_module_names
