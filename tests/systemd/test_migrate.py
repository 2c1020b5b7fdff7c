"""docs/migrate.md on a real systemd: a bare unit, a cron check and a watchdog timer become one supervised instance."""

import pytest

from fakes.ports import free_port
from fakes.rig import ROOT, Rig
from fakes.supervisor_process import Client, until

pytestmark = pytest.mark.systemd

COMMAND = "/opt/vllm-supervisor/bin/vllm-supervisor"
UNIT = """\
[Unit]
After=network.target
[Service]
User=nobody
EnvironmentFile=-/etc/default/vllm
ExecStartPre=/bin/sleep 1
ExecStart=/bin/bash -c 'exec /opt/vllm/bin/vllm serve $MODEL --host 127.0.0.1 --port {port} >> /tmp/vllm.log 2>&1'
Restart=always
[Install]
WantedBy=multi-user.target
"""
CHECK = "curl -fs -m 5 http://127.0.0.1:{port}/health || systemctl restart vllm.service\n"
FILES = {
    "/etc/systemd/system/vllm.service": UNIT,
    "/etc/default/vllm": "MODEL=tiny\n",
    "/etc/cron.d/vllm-check": f"*/5 * * * * root {CHECK}",
    "/etc/systemd/system/dog.service": f"[Service]\nType=oneshot\nExecStart=/bin/sh -c '{CHECK.strip()}'\n",
    "/etc/systemd/system/dog.timer": "[Timer]\nOnUnitActiveSec=1h\nOnActiveSec=1h\n[Install]\nWantedBy=timers.target\n",
}


def test_the_page_word_by_word(rig: Rig) -> None:
    """The printed script changes over, doctor has no error or warning left once the cron line is out, and back it goes."""
    port = free_port()
    new = f"vllm-supervisor@{port}.service"
    for path, text in FILES.items():
        rig.write(path, text.replace("{port}", str(port)))
    rig.systemctl("daemon-reload")
    rig.systemctl("enable", "--now", "vllm.service", "dog.timer")
    with Client(port) as client:
        until(client.listens, within=30.0, what="the old server listens", else_say=lambda: "")
        printed = rig.run(COMMAND, "doctor", "--migrate", "vllm.service")
        assert printed.returncode == 0, printed
        assert "/etc/cron.d/vllm-check" in printed.stdout
        rig.write("/root/migrate.sh", printed.stdout.replace("configs/systemd", "/etc/systemd/shipped"))
        for unit in (ROOT / "configs" / "systemd").glob("*.service"):
            rig.write(f"/etc/systemd/shipped/{unit.name}", unit.read_text())
        done = rig.run("sh", "/root/migrate.sh")
        assert done.returncode == 0, done
        assert client.get("/readyz").json()["engine"] == "ready"
        assert client.chat().status_code == 200
        states = rig.run("systemctl", "is-active", "vllm.service", "dog.timer", new).stdout.split()
        assert states == ["inactive", "inactive", "active"]
        rig.path("/etc/cron.d/vllm-check").unlink()
        checked = rig.run(COMMAND, "--name", str(port), "doctor")
        assert checked.returncode == 0, checked.stdout
        back = [
            line.removeprefix("#").strip() for line in printed.stdout.partition("# The way back:\n")[2].splitlines()
        ]
        assert rig.run("sh", "-e", "-c", "\n".join(back)).returncode == 0
        until(client.listens, within=30.0, what="the old server is back", else_say=lambda: "")
        assert rig.systemctl("is-active", "vllm.service", "dog.timer").split() == ["active", "active"]
    rig.systemctl("disable", "--now", "vllm.service", "dog.timer")
    for path in FILES:
        rig.path(path).unlink(missing_ok=True)
