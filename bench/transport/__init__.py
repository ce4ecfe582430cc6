"""Two processes without Ray Serve: an echo, over our transport and over what else there is.

Layout:
    peers/      one file each: a server and a client that speak the same
    process     (child process) runs one side of a peer
    run         measures the cells, peer by peer, round by round
"""
