"""Each example does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import yaml
from documents import schemas
from documents.blocks import ROOT
from documents.cluster import Cluster

EXAMPLES = ROOT / "examples"


def run(name: str, cluster: Cluster, *arguments: str, join: bool = True) -> str:
    """What the example prints."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=cluster.environment(join=join),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-6000:]
    return ran.stdout


def test_a_client_reads_tokens_and_one_that_leaves_stops_the_model(cluster: Cluster) -> None:
    printed = run("token_stream.py", cluster, "--http", f"http://127.0.0.1:{cluster.http_port}")
    assert "the patient client read 50 words: The reader sets the pace.…" in printed
    assert "the other one left after: The reader sets the pace\n" in printed
    stopped = re.search(r"the model stopped for it after (\d+) of 100000 tokens", printed)
    assert stopped, printed
    assert 5 <= int(stopped[1]) < 100_000


def test_the_ensemble_averages_its_models_and_passes_the_array_on(cluster: Cluster) -> None:
    printed = run("ensemble.py", cluster)
    assert "5 batches of 1.0 MB, 3 models: (16, 10) scores, all as expected" in printed
    assert "calls from the ensemble to its models: {'unix': 15}" in printed


def test_the_feature_pipeline_computes_what_its_driver_computes(cluster: Cluster) -> None:
    printed = run("feature_pipeline.py", cluster)
    assert "200000 events (3.2 MB) -> 1000 users, as computed here" in printed
    assert "carried by: unix\n" in printed


def test_the_custom_serializer_carries_request_and_response(cluster: Cluster) -> None:
    printed = run("custom_serializer.py", cluster)
    assert "26000 words counted; 'a' came 6000 times" in printed
    sizes = re.search(r"the request had (\d+) bytes instead of (\d+)", printed)
    assert sizes, printed
    assert 10 * int(sizes[1]) < int(sizes[2])
    assert "keys came back as {'1': 'one'}" in printed


def test_two_applications_are_deployed_from_one_config(cluster: Cluster) -> None:
    config = EXAMPLES / "multi_app.yaml"
    schemas.check(yaml.safe_load(config.read_text()), config.name)
    deployed = subprocess.run(
        ["serve", "deploy", str(config)],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    answer = json.loads(fetch(f"http://127.0.0.1:{cluster.http_port}/shop?item=compass"))
    assert answer == {"item": "compass", "see also": ["dinghy", "anchor"], "lanes": ["unix"]}


def test_the_image_pipeline_classifies_over_our_transport(cluster: Cluster) -> None:
    arguments = ("--transports", "native", "--requests", "4", "--rounds", "1")
    printed = run("image_pipeline.py", cluster, *arguments, join=False)
    assert "demo: OK - all answers right, every hop of ours carried by ray_serve_grpc" in printed


def test_the_list_of_examples_names_each_of_them_and_no_other() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".py", ".yaml"}}
    listed = set(re.findall(r"\]\(([\w.]+\.(?:py|yaml))\)", (EXAMPLES / "README.md").read_text()))
    assert listed == files


def fetch(url: str) -> bytes:
    """Tries until the application answers, for at most two minutes."""
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return bytes(response.read())
        except (urllib.error.HTTPError, urllib.error.URLError):
            if time.monotonic() > deadline:
                pytest.fail(f"no answer from {url}")
            time.sleep(0.2)
