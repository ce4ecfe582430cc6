"""Runs what the documentation shows.

Layout:
    blocks    the code blocks of a Markdown file
    cluster   a local Ray cluster with a dashboard, shared by all pages and examples
    driver    (child process) executes the Python blocks of one page, as one script
    commands  the lines of console blocks, as they are run in a test
    page      all blocks of one page, in order
    schemas   what YAML blocks must look like
"""
