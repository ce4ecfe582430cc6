"""Calls between Ray Serve deployments, over each transport.

Layout:
    variants    transports and modes of threading, as environment variables
    plan        which cells a run measures
    app         the deployments: a caller that measures, a middle and a leaf that answer
    cluster     (child process) a driver with one Ray cluster
    run         measures the cells, variant by variant, round by round
"""
