"""Calls between two hosts, modelled by network namespaces on one machine.

Layout:
    network     two namespaces joined by a link of a given rate; needs root, touches nothing outside of them
    cluster     (child process) a Ray node in each, the caller on one, what it calls on the other
    run         measures the cells at each rate
"""
