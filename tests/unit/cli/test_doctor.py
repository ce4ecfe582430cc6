"""How the doctor judges what it was told, how the command ends, and what it prints."""

from __future__ import annotations

import copy
import json

import pytest
from click.testing import CliRunner

from ray_serve_grpc.cli import doctor
from ray_serve_grpc.cli.main import cli
from ray_serve_grpc.seam.activation import SWITCHED_OFF

SOUND = {
    "host": "here",
    "pid": 1,
    "user": 1000,
    "platform": "x86_64",
    "python": "3.11.7",
    "version": "1.0",
    "ray_version": "2.60.0",
    "adapter": "authenticated",
    "active": True,
    "reason": "",
    "parts": {"client": "active", "replica": "active"},
    "lanes": {lane: {"usable": True, "reason": ""} for lane in ("shm", "unix", "tcp")},
    "tls": False,
    "token": False,
    "settings": {},
    "probes": [{"name": "memfd", "outcome": "ok", "detail": "made", "hint": ""}],
}
PING = {
    "lane": "unix",
    "endpoint": "unix:/there.sock",
    "error": "",
    "version": "1.0",
    "shared_memory": True,
    "round_trip_us": {"min": 40.0, "median": 50.0},
}
REPLICA = {
    "application": "app",
    "deployment": "Model",
    "replica": "abc",
    "actor_id": "00",
    "node_id": "11",
    "node_ip": "10.0.0.1",
    "port": 5,
    "java": False,
    "process": SOUND,
    "error": "",
    "pings": [PING],
}


def cluster(**changes):
    """Of one replica that differs from a sound one by these."""
    replica = copy.deepcopy(REPLICA) | changes
    return {"address": "a:1", "nodes": 1, "serve": True, "error": "", "replicas": [replica], "proxies": []}


def told(**changes):
    return copy.deepcopy(SOUND) | changes


def judged(machine=SOUND, **changes):
    return doctor.judged(machine, cluster(**changes))


def test_a_sound_cluster_has_no_findings():
    assert judged() == []


def test_a_replica_without_the_plugin_is_one_finding_with_its_remedy():
    off = told(active=False, reason=SWITCHED_OFF, parts=dict.fromkeys(("client", "replica"), SWITCHED_OFF))
    [finding] = judged(process=off)
    assert finding.where == "app/Model/abc"
    assert SWITCHED_OFF in finding.problem
    assert "RAY_SERVE_GRPC_NATIVE=0" in finding.hint


def test_a_replica_that_serves_with_rays_transport_is_a_finding_though_its_calls_are_ours():
    [finding] = judged(process=told(parts={"client": "active", "replica": "no _server"}))
    assert "'replica'" in finding.problem
    assert "no _server" in finding.problem


def test_a_process_that_does_not_tell_of_itself_is_a_finding():
    [finding] = judged(process=None, error="ModuleNotFoundError: no ray_serve_grpc")
    assert "ModuleNotFoundError" in finding.problem
    assert "install" in finding.hint


def test_another_version_is_a_finding():
    [finding] = judged(process=told(version="0.9"))
    assert "0.9" in finding.problem
    assert "1.0" in finding.problem


def test_a_ping_that_failed_is_a_finding_with_its_address():
    [finding] = judged(pings=[PING, PING | {"lane": "tcp", "endpoint": "tcp:10.0.0.1:5", "error": "refused"}])
    assert "tcp: refused" in finding.problem
    assert "tcp:10.0.0.1:5" in finding.hint


def test_a_replica_out_of_reach_is_a_finding():
    [finding] = judged(pings=[])
    assert "RAY_SERVE_GRPC_LANES" in finding.hint


def test_each_failed_probe_is_a_finding_of_the_process_it_failed_in():
    failed = {"name": "memfd", "outcome": "failed", "detail": "refused", "hint": "allow it."}
    findings = judged(machine=told(probes=[failed]), process=told(probes=[failed, failed]))
    assert [finding.where for finding in findings] == ["this machine", "app/Model/abc", "app/Model/abc"]
    assert {finding.hint for finding in findings} == {"allow it."}


def test_a_java_replica_is_no_fault():
    assert judged(java=True, process=None, pings=[]) == []


def test_a_proxy_without_the_plugin_is_a_finding():
    found = cluster()
    found["proxies"] = [{"node_id": "abcdef012345", "process": told(active=False, reason=SWITCHED_OFF), "error": ""}]
    [finding] = doctor.judged(SOUND, found)
    assert finding.where == "the proxy of node abcdef01"


def examined(monkeypatch, findings, found):
    report = {"format": 1, "ok": not findings, "findings": findings, "machine": SOUND, "cluster": found}
    monkeypatch.setattr(doctor, "examined", lambda address, progress: report)
    return report


FINDING = {"where": "this machine", "problem": "[memfd] is refused", "hint": "allow it."}


@pytest.mark.parametrize(("findings", "code"), [([], 0), ([FINDING], 1)])
def test_the_exit_code_tells_whether_something_is_wrong(monkeypatch, findings, code):
    examined(monkeypatch, findings, None)
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == code
    assert CliRunner().invoke(cli, ["doctor", "--json"]).exit_code == code


def test_json_is_the_report_and_nothing_else(monkeypatch):
    report = examined(monkeypatch, [FINDING], cluster())
    assert json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout) == report


def test_the_text_tells_findings_hints_and_pings_without_colours_or_padding(monkeypatch):
    examined(monkeypatch, [FINDING], cluster())
    text = CliRunner().invoke(cli, ["doctor"]).stdout
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "1. this machine: [memfd] is refused" in text
    assert "hint: allow it." in text
    [ping] = [line for line in text.splitlines() if "shared memory" in line]
    assert ping.split() == ["app/Model/abc", "unix", "50", "40", "ray_serve_grpc", "1.0,", "shared", "memory"]


def test_a_replica_that_could_not_be_asked_is_shown(monkeypatch):
    examined(monkeypatch, [FINDING], cluster(process=None, error="no [answer] in time"))
    assert "unknown: no [answer] in time" in CliRunner().invoke(cli, ["doctor"]).stdout


@pytest.mark.parametrize(
    ("address", "told"),
    [("127.0.0.1:1", "nothing answers at 127.0.0.1:1"), ("ray://127.0.0.1:1", "no address of a node")],
)
def test_an_address_without_a_cluster_is_a_finding_with_a_hint(address, told):
    done = CliRunner().invoke(cli, ["doctor", "--json", "--address", address])
    report = json.loads(done.stdout)
    [finding] = [finding for finding in report["findings"] if address in finding["where"]]
    assert told in finding["problem"]
    assert finding["hint"]
    assert (done.exit_code, report["cluster"]) == (1, None)
