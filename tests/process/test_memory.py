"""Unified memory with real processes: the kill at the floor, the gate before a start, admission while memory is low."""

import signal
import sys

import psutil
import pytest

from fakes import eater
from fakes.machine import GIB, Deaths, Machine
from fakes.supervisor_process import Account, Client, StartMock, Supervisor


@pytest.fixture
def machine(account: Account) -> Machine:
    """Give a machine whose memory the test sets."""
    return Machine(account.home)


def events(supervisor: Supervisor, name: str) -> list[dict]:
    """Give what the log holds of one event so far."""
    return [line for line in supervisor.log() if line["event"] == name]


def seen(client: Client, gib: float) -> bool:
    """Say whether the guard has seen so much available."""
    return f"memory_available_bytes {int(gib * GIB)}" in client.get("/metrics").text


def spawned(supervisor: Supervisor, number: int) -> bool:
    """Say whether engine `number` was started."""
    return any(line["incarnation"] == number for line in events(supervisor, "spawned"))


def test_an_engine_that_eats_a_gibibyte_a_second_is_dead_within_150_ms(account: Account) -> None:
    """Real memory, a floor half a GiB below what this machine has: from the look that crosses to the last process, < 150 ms."""
    memory = psutil.virtual_memory()
    floor = 100 * (memory.available - GIB / 2) / memory.total
    sets = (
        "memory.mode=unified", f"memory.floor={floor:.3f}%", f"memory.low={floor:.3f}%", "restart.start_attempts=1",
        "listen.port=0",
    )  # fmt: skip
    before = tuple(word for key in sets for word in ("--set", key))
    engine = (sys.executable, eater.__file__, "{port}", str(3 * 1024))
    supervisor = account.start(*before, "run", "--", *engine)
    supervisor.until(lambda: "eating" in supervisor.out.text, within=20.0, what="the engine to eat")
    family = supervisor.until(
        lambda: found if len(found := supervisor.descendants()) == 3 else None, within=5.0, what="its three processes"
    )
    last = Deaths(process.pid for process in family).last(within=20.0)
    supervisor.until_said("parked", within=10.0)
    crossed = events(supervisor, "memory_floor")[0]
    took = last - crossed["t"]
    print(f"\nfrom the look that crossed to the last process dead: {took * 1000:.1f} ms")  # noqa: T201 - a measurement
    assert 0 < took < 0.150, supervisor.words()
    assert crossed["available_bytes"] > floor / 100 * memory.total - GIB / 2  # one look's fall, and a late look
    assert events(supervisor, "exited")[0]["cause"] == "out_of_memory"
    assert list((account.home / "state").glob("**/incident.json"))
    supervisor.signal(signal.SIGTERM)
    supervisor.ends(within=10.0)
    account.expect_nothing_left()


NO_MEMORY = "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051)"


def test_the_drivers_word_with_memory_to_spare_ends_nothing(start_mock: StartMock, machine: Machine) -> None:
    """NV_ERR_NO_MEMORY with 90 of 120 GiB available, during the load and after it: the engine serves on."""
    supervisor, client = start_mock(before=machine.options())
    machine.available(90.0)
    machine.kernel_says(NO_MEMORY)
    supervisor.until(client.is_ready, within=15.0, what="ready")
    machine.kernel_says(NO_MEMORY)
    for gib in (89.0, 88.0, 87.0):  # each is a look that comes after the line
        machine.available(gib)
        supervisor.until(lambda gib=gib: seen(client, gib), within=5.0, what=f"{gib} GiB seen")
    assert client.chat().status_code == 200
    assert not events(supervisor, "memory_floor")
    assert not spawned(supervisor, 2)


@pytest.mark.parametrize(("card", "explains"), [("0000:01:00", True), ("0000:41:00", False)])
def test_another_cards_fault_explains_nothing(
    start_mock: StartMock, machine: Machine, card: str, explains: bool
) -> None:
    """The engine uses the first card: Xid 79 of it parks, that of another card is no reason, and the next engine starts."""
    machine.has_cards("0000:01:00.0", "0000:41:00.0")
    options = machine.options("memory.mode=off", "restart.backoff=50ms")
    supervisor, client = start_mock(before=options, under=("env", "CUDA_VISIBLE_DEVICES=0"))
    supervisor.until(client.is_ready, within=15.0, what="ready")
    main = events(supervisor, "spawned")[0]["pid"]
    machine.kernel_says(f"NVRM: Xid (PCI:{card}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    psutil.Process(main).kill()
    if explains:
        supervisor.until_said('"parked"', within=10.0)
        assert "gpu off the bus" in client.get("/readyz").json()["reason"]
        assert not spawned(supervisor, 2)
    else:
        supervisor.until(lambda: spawned(supervisor, 2), within=10.0, what="the next engine")
        assert "fallen off the bus" not in events(supervisor, "exited")[0]["sentence"]


def test_a_restart_waits_until_memory_is_back(start_mock: StartMock, machine: Machine, account: Account) -> None:
    """NV_ERR_NO_MEMORY while memory is low ends the engine; the next one is spawned when the level of before is back."""
    supervisor, client = start_mock(before=machine.options("restart.backoff=50ms"))
    supervisor.until(client.is_ready, within=15.0, what="ready")
    for gib in (20.0, 14.0, 10.0):  # low is 10.8 GiB, the floor 7.2 GiB; all at once would be too fast for another look
        machine.available(gib)
        supervisor.until(lambda gib=gib: seen(client, gib), within=5.0, what=f"{gib} GiB seen")
    machine.kernel_says(NO_MEMORY)
    waits = supervisor.until(lambda: events(supervisor, "memory_wait"), within=10.0, what="the gate")
    assert (
        "10.0 GiB available, 97.6 GiB wanted (100.0 GiB before the last engine, less 2.4 GiB)" in waits[0]["sentence"]
    )
    assert not spawned(supervisor, 2)
    answer = client.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
    machine.available(97.0)
    machine.available(98.0)
    supervisor.until(client.is_ready, within=15.0, what="ready again")
    log = [line["event"] for line in supervisor.log()]
    assert log.index("memory_back") < log.index("spawned", log.index("memory_wait"))
    ended = events(supervisor, "exited")[0]
    assert (ended["cause"], "NV_ERR_NO_MEMORY" in ended["sentence"]) == ("out_of_memory", True)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.ends(within=10.0) == 0, supervisor.words()
    account.expect_nothing_left()


def test_memory_that_never_comes_back_parks_with_the_numbers(start_mock: StartMock, machine: Machine) -> None:
    """At the end of memory.gate_timeout nothing is tried any more: clients read why, operators the numbers."""
    supervisor, client = start_mock(before=machine.options("restart.backoff=50ms", "memory.gate_timeout=500ms"))
    supervisor.until(client.is_ready, within=15.0, what="ready")
    machine.available(6.0)  # below the floor of 7.2 GiB
    supervisor.until_said('"parked"', within=10.0)
    reason = supervisor.events("parked")[0]["sentence"]
    assert "did not come back within 0 s: 6.0 GiB available, 97.6 GiB wanted" in reason.replace("0.5", "0")
    assert client.get("/readyz").json()["reason"].startswith("the engine cannot start: too little memory is free; ")
    assert client.chat().json()["error"]["code"] == "engine_parked"
    assert client.get("/livez").status_code == 200
    assert not spawned(supervisor, 2)


def test_an_engine_starts_beside_a_model_that_moved_in(start_mock: StartMock, machine: Machine) -> None:
    """110 GiB before, 70 since another program holds 38: the neighbour is named, and the engine starts with what there is."""
    machine.available(110.0)
    supervisor, client = start_mock(before=machine.options("restart.backoff=50ms"))
    supervisor.until(client.is_ready, within=15.0, what="ready")
    machine.available(70.0)
    machine.has_process(4089, "VLLM::EngineCore", gib=38.2)
    supervisor.until(lambda: seen(client, 70.0), within=5.0, what="70 GiB seen")
    psutil.Process(events(supervisor, "spawned")[0]["pid"]).kill()
    supervisor.until(lambda: spawned(supervisor, 2), within=20.0, what="the next engine")
    said = events(supervisor, "memory_below")[0]["sentence"]
    assert said.startswith("70.0 GiB available, 107.6 GiB wanted")
    assert said.endswith("it starts with that; held by VLLM::EngineCore (pid 4089, 38.2 GiB)")
    supervisor.until(client.is_ready, within=15.0, what="ready again")


def test_a_restart_takes_the_level_of_now(start_mock: StartMock, machine: Machine, account: Account) -> None:
    """Parked for want of memory; 12 of 120 GiB are above low, and who asks for a restart gets one."""
    supervisor, client = start_mock(before=machine.options("restart.backoff=50ms", "memory.gate_timeout=500ms"))
    supervisor.until(client.is_ready, within=15.0, what="ready")
    machine.available(6.0)
    supervisor.until_said('"parked"', within=10.0)
    machine.available(12.0)
    supervisor.until(lambda: seen(client, 12.0), within=5.0, what="12 GiB seen")
    assert account.tool("restart", "--reason", "beside the other").returncode == 0
    supervisor.until(client.is_ready, within=20.0, what="ready again")


def test_a_vllm_server_without_a_supervisor_is_warned_of(start_mock: StartMock, machine: Machine) -> None:
    """Name, pid, port and memory stand in one line at the start; an engine of a supervisor is not warned of."""
    machine.has_process(4089, "vllm", "serve", "m", "--port", "9", gib=3.0)
    machine.has_process(4090, "vllm", "serve", "m", "--uds", "/run/x/engine-0a1b2c3d-1/sock", gib=3.0)
    supervisor, client = start_mock(before=machine.options())
    supervisor.until(client.is_ready, within=15.0, what="ready")
    said = [line["sentence"] for line in events(supervisor, "bare_vllm")]
    assert len(said) == 1
    assert said[0].startswith(
        "vllm serve (pid 4089, port 9, 3.0 GiB) runs on this machine without a supervisor; stop it"
    )


def test_low_memory_refuses_new_work_and_lets_open_work_finish(start_mock: StartMock, machine: Machine) -> None:
    """Falling below 9 %: a new request reads memory_pressure, readiness is off, the open stream ends with [DONE]."""
    supervisor, client = start_mock(before=machine.options())
    supervisor.until(client.is_ready, within=15.0, what="ready")
    with client.stream(max_tokens=80, ignore_eos=True) as stream:
        next(stream)
        for gib in (20.0, 14.0, 9.5):  # low is 10.8 GiB; all at once would be too fast for another look
            machine.available(gib)
            supervisor.until(lambda gib=gib: seen(client, gib), within=5.0, what=f"{gib} GiB seen")
        supervisor.until_said("memory_low")
        refused = client.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_pressure"), supervisor.words()
        assert "memory is low" in refused.json()["error"]["message"]
        assert client.get("/readyz").status_code == 503
        assert list(stream)[-1] == "[DONE]"
    metrics = client.get("/metrics").text
    assert 'vllm_supervisor_memory_pressure{level="low"} 1' in metrics
    assert f"vllm_supervisor_memory_available_bytes {int(9.5 * GIB)}" in metrics
    assert "vllm_supervisor_memory_floor_bytes 7730941132" in metrics
    assert not spawned(supervisor, 2)


def test_on_a_machine_without_shared_memory_everything_is_off_and_said(start_mock: StartMock, machine: Machine) -> None:
    """memory.mode = auto and no GPU to be seen: nothing is guarded, a floor crossed means nothing, the status says why."""
    supervisor, client = start_mock(before=machine.options("memory.mode=auto"))
    supervisor.until(client.is_ready, within=15.0, what="ready")
    said = events(supervisor, "memory_guard")[0]["sentence"]
    assert said == "memory guard off: no GPU that shares the machine's memory is seen"
    machine.available(1.0)
    assert "\nvllm_supervisor_memory_" not in client.get("/metrics").text
    assert client.is_ready()


def test_a_headless_node_is_watched_over_without_a_front_door(account: Account) -> None:
    """`serve --headless`: nothing listens, the tools find it by name, its processes go with it."""
    supervisor = account.start("--set", "log.format=json", "--engine", "mock", "serve", "tiny", "--headless")
    supervisor.until_said('"ready"', within=15.0)
    assert "no front door" in supervisor.err.text
    supervisor.until(lambda: "startup complete" in supervisor.out.text, within=15.0, what="a load that can be stopped")
    status = account.tool("--name", "headless", "status", "--json")
    assert '"listen": []' in status.stdout
    assert not [one for one in psutil.Process(supervisor.pid).net_connections("tcp") if one.status == "LISTEN"]
    assert account.tool("--name", "headless", "stop").returncode == 0
    assert supervisor.ends(within=15.0) == 0, supervisor.words()
    account.expect_nothing_left()
