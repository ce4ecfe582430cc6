"""The commands."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

import ray_serve_grpc
from ray_serve_grpc.cli import doctor as examination
from ray_serve_grpc.cli import show

#: 128 and SIGINT, as shells have it.
INTERRUPTED = 130

#: Messages beside the result, so that stdout holds nothing else.
_aside = Console(stderr=True, highlight=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(ray_serve_grpc.__version__, prog_name="ray-serve-grpc")
def cli() -> None:
    """Looks after ray_serve_grpc, the transport of calls between Ray Serve deployments."""


@cli.command()
@click.option("--address", default=examination.AUTO, show_default=True, help="Ray cluster to look at.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def doctor(context: click.Context, address: str, as_json: bool) -> None:
    """Report on this machine and on every replica of a running cluster.

    Tries out what the lanes are made of, asks each replica and proxy whether the plugin is active there, and pings
    each replica over each lane. Works without a cluster too.

    Exit code: 0 if nothing is wrong, else 1, with a hint for each thing found.
    """
    with _aside.status("looking at this machine") as status:
        report = examination.examined(address, status.update)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show.show(report)
    context.exit(0 if report["ok"] else 1)


@cli.command()
@click.option("--quick", is_flag=True, help="About half a minute, instead of three.")
@click.option("--address", default=examination.AUTO, show_default=True, help="Ray cluster to measure on.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_context
def bench(context: click.Context, quick: bool, address: str, as_json: bool) -> None:
    """Measure actor calls, Ray's grpc.aio and this transport on a cluster.

    Deploys two small applications of its own on the node it runs on, without reserving CPUs, and deletes them
    afterwards, also after Ctrl-C. Other applications are left alone, but they and the bench slow each other down.
    Without a running cluster it starts a local one for itself.

    Exit code: 0 with figures, 1 if none could be had, 130 after Ctrl-C.
    """
    from ray_serve_grpc.cli.bench import run, table
    from ray_serve_grpc.cli.cluster import NoCluster

    plan = run.QUICK if quick else run.FULL
    columns = ("[progress.description]{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=_aside, transient=True) as progress:
            task = progress.add_task(f"joining the cluster at {address}", total=plan.steps())
            with run.joined(address):
                report = run.measured(plan, lambda what, done: progress.update(task, description=what, completed=done))
    except (NoCluster, run.BenchFailed) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        _aside.print("interrupted; the bench's applications are deleted")
        context.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show.printed(lambda out: table.show(report, out))


if __name__ == "__main__":
    cli()
