"""The files people deploy with agree with the code: units, Containerfile, Kubernetes manifests, HAProxy."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllm_supervisor.cli.control import drain
from vllm_supervisor.core.config import build
from vllm_supervisor.core.doctor import Level
from vllm_supervisor.core.doctor_units import UnitFacts, unit
from vllm_supervisor.core.routes import Kind, Router
from vllm_supervisor.core.systemd_words import span
from vllm_supervisor.core.timeouts import Limits, plan

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SERVICES = [CONFIGS / "systemd" / "vllm-supervisor@.service", CONFIGS / "systemd" / "user" / "vllm-supervisor.service"]
MANIFEST = CONFIGS / "kubernetes" / "vllm-supervisor.yaml"


def keys(path: Path) -> dict[str, str]:
    """Give the assignments of a unit file, the last of each."""
    lines = (line.partition("=") for line in path.read_text().splitlines() if re.match(r"\w+=", line))
    return {name: value for name, _, value in lines}


def needed(environ: dict[str, str]) -> Limits:
    """Give the limits of a stop that a configuration from the environment has."""
    config = build(None, environ, ()).config
    outer = config.drain.outer
    return Limits(
        outer=None if outer == "auto" else outer,
        outer_owner="the deployment",
        propagation=config.drain.propagation,
        drain=config.drain.budget,
        engine_stop=config.engine.stop_grace,
        documentation=config.drain.documentation,
        reserve=config.drain.reserve,
    )


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_shipped_unit_passes_our_own_doctor(path: Path) -> None:
    """Every rule for units holds, and the stop limit fits the default configuration."""
    found = keys(path)
    properties = {**found, "WatchdogUSec": found["WatchdogSec"], "ActiveState": "active"}
    facts = UnitFacts(
        path.name,
        user=False,
        properties=properties,
        command=found["ExecStart"],
        environ={},
        stop_s=span(found["TimeoutStopSec"]),
    )
    assert facts.ours
    assert [finding.level for finding in unit(facts, plan(needed({})).total)] == [Level.OK]


def test_a_shipped_unit_leaves_cuda_what_it_needs() -> None:
    """None of the hardening that breaks CUDA is switched on."""
    found = keys(SERVICES[0])
    broken = {
        "MemoryDenyWriteExecute",
        "ProcSubset",
        "PrivateDevices",
        "DevicePolicy",
        "ProtectControlGroups",
        "PrivateIPC",
    }
    assert not broken & found.keys()


def test_the_environment_file_holds_keys_that_exist() -> None:
    """Each of our variables in it, those commented out included, is a key with a good value."""
    lines = (CONFIGS / "systemd" / "vllm-supervisor.env").read_text().splitlines()
    assignments = [line.lstrip("#") for line in lines if re.match(r"#?VLLM_SUPERVISOR_\w+=", line)]
    assert len(assignments) >= 4
    build(None, dict(line.split("=", 1) for line in assignments), ())


# -- container


def container_environ() -> dict[str, str]:
    """Give the variables the image sets."""
    text = (CONFIGS / "container" / "Containerfile").read_text()
    return dict(re.findall(r"^(?:ENV|   ) ?(\w+)=(\S+?)(?: \\)?$", text, re.MULTILINE))


def test_the_image_runs_us_as_pid_1_without_a_shell() -> None:
    """The entry point is a list of words, signals reach it, and vLLM's python3 is not hidden."""
    text = (CONFIGS / "container" / "Containerfile").read_text()
    assert 'ENTRYPOINT ["vllm-supervisor", "serve"]' in text
    assert "STOPSIGNAL SIGTERM" in text
    assert "PATH=/opt/vllm-supervisor" not in text
    for source in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split()), source


def test_the_images_plan_fits_its_own_stop_limit() -> None:
    """What the image sets are keys that exist, and the plan fits without shrinking the drain."""
    environ = container_environ()
    assert plan(needed({name: value for name, value in environ.items() if name.startswith("VLLM_SUPERVISOR_")})).fits
    assert (
        f"--stop-timeout {environ['VLLM_SUPERVISOR_DRAIN__OUTER'].removesuffix('s')}"
        in (CONFIGS / "container" / "Containerfile").read_text()
    )


# -- Kubernetes


def documents() -> list[dict[str, Any]]:
    """Give the objects of the manifest."""
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def pod() -> dict[str, Any]:
    """Give the pod's specification."""
    found: dict[str, Any] = next(one for one in documents() if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    return found


def environ_of(container: dict[str, Any]) -> dict[str, str]:
    """Give our variables of a container."""
    return {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("VLLM_SUPERVISOR_")}


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_the_manifests_fit_the_schema(version: str) -> None:
    """Every object is valid, unknown fields included, for an old and for the newest schema."""
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_grace_period_adds_up() -> None:
    """It is what we are told it is, the plan fits it, and a hook that waits for the whole drain does not break it."""
    (container,) = pod()["containers"]
    environ = environ_of(container)
    assert environ["VLLM_SUPERVISOR_DRAIN__OUTER"] == f"{pod()['terminationGracePeriodSeconds']}s"
    limits = needed(environ)
    assert plan(limits).fits
    after_hook = plan(limits, hook=limits.drain)  # it waits for drain.budget at most
    assert after_hook.missing == 0
    assert after_hook.hook + after_hook.total <= pod()["terminationGracePeriodSeconds"]


def test_the_hook_is_a_command_of_ours() -> None:
    """Its words parse, and its options are the hook's."""
    (container,) = pod()["containers"]
    words = container["lifecycle"]["preStop"]["exec"]["command"]
    assert words[:2] == ["vllm-supervisor", "drain"]
    parsed = drain.make_context("drain", words[2:]).params
    assert (parsed["hook"], parsed["wait"]) == (True, True)


def test_each_probe_asks_its_own_path() -> None:
    """Startup, readiness and liveness are three questions, on paths that the front door answers itself."""
    (container,) = pod()["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    router = Router(root_paths=(), allow_paths=(), health_means_alive=False)
    asked = [router.route(b"GET", path.encode()).kind for path in paths.values()]
    assert asked == [Kind.STARTED, Kind.READY, Kind.LIVE]
    assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] >= 60


def test_nothing_is_injected_and_the_state_outlives_the_pod() -> None:
    """Service links are off; the state directory lies on a claim, not in the pod."""
    assert pod()["enableServiceLinks"] is False
    (container,) = pod()["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = next(one for one in documents() if one["kind"] == "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert mounts[environ_of(container)["VLLM_SUPERVISOR_STATE_DIR"]] in {claim["metadata"]["name"] for claim in claims}


def uncommented_numbers() -> Iterator[str]:
    """Yield the lines with a number of ours that neither they nor the line above explain."""
    above = ""
    for line in MANIFEST.read_text().splitlines():
        value = line.partition("#")[0]
        is_number = re.search(r"[:,{] ?\"?\d+(?:s|Gi|Mi)?\"?\s*(?:[},]|$)", value)
        if is_number and "#" not in line and not above.lstrip().startswith("#"):
            yield line
        above = line


def test_each_number_of_the_manifests_is_explained() -> None:
    """A comment stands on its line or above it."""
    assert list(uncommented_numbers()) == []


def test_every_word_of_the_images_entry_point_is_a_command() -> None:
    """What a pod's args are appended to is `serve`."""
    text = (CONFIGS / "container" / "Containerfile").read_text()
    words = shlex.split(re.search(r"^ENTRYPOINT \[(.*)\]$", text, re.MULTILINE)[1].replace(",", " "))
    assert words == ["vllm-supervisor", "serve"]
