"""The seam into Ray: the only room that knows names of `ray.serve._private` and `ray._private`.

Layout:
    hook        adds a finder to `sys.meta_path` that reports when a target module was imported
    activation  decides whether a patch goes on, and remembers what became of it
    probe       checks that a module of Ray has what a patch relies on
    *_patch     one patch for each target module; checks everything before it changes anything
    adapter     the facade through which the rest of the package sees Ray
    metadata    Ray's request metadata to and from the wire
"""
