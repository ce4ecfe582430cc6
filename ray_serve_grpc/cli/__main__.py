"""`python -m ray_serve_grpc.cli`."""

from ray_serve_grpc.cli.main import cli

cli(prog_name="ray-serve-grpc")
