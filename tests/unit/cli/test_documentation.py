"""docs/cli.md says what the command says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ray_serve_grpc.cli import process
from ray_serve_grpc.cli.main import cli

TEXT = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
SHOWN = dict(re.findall(r"```console\n\$ ray-serve-grpc ?(.*?) ?--help\n(.*?)\n```", TEXT, re.DOTALL))


def test_every_command_is_shown():
    assert set(SHOWN) == {"", *cli.commands}


@pytest.mark.parametrize("command", ["", *cli.commands])
def test_the_help_shown_is_what_the_command_prints(command):
    printed = CliRunner().invoke(cli, [*command.split(), "--help"], prog_name="ray-serve-grpc").output
    assert SHOWN[command] == printed.rstrip()


def test_every_key_of_a_process_is_described():
    report = process.report()
    keys = {*report, *report["lanes"], *report["lanes"]["tcp"], *report["probes"][0]}
    assert keys <= set(re.findall(r"`(\w+)`", TEXT))
