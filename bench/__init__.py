"""Benchmarks of the transport, side by side with what else could carry the calls.

Layout:
    cli         `python -m bench …`
    serve/      calls between Ray Serve deployments: actor calls over Plasma, Ray's grpc.aio, ours
    two_hosts/  the same between network namespaces
    transport/  two processes without Serve: ours, grpc.aio, pygrpc-native, pyzmq, a bare Unix socket
    load        the loads of a measurement, in the process that calls
    rounds      measures a cell for several variants in turns
    children    child processes that measure
    payloads    sizes, and values of a size
    clocks      CPU time of processes, by role
    samples     what one measurement gives, and how the rounds of a cell become figures
    results     the result files
    machine     what they were measured on
    compare     reads results cell by cell, variants beside each other
    bar         what the project set out to reach
    tables      results on a terminal
    plot        charts
    report      docs/benchmarks.md

A cell is one test at one size with one variant. The variants of a cell are measured in turns, several rounds, each in
processes of its own; a figure is the median of its rounds, with the lowest and the highest beside it.
"""
