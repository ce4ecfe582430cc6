"""Child process: executes the Python blocks of one page, one after the other, as if they were one script.

Lines of JSON come on standard input: {"text": …, "place": "docs/page.md", "line": …}. To each goes an answer:
{"printed": …, "error": …}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import types


def main() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what native code prints must not come between the answers
    sys.path.insert(0, os.getcwd())
    # Ray sends what __main__ defines by value, as it does for a script.
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    for line in requests:
        request = json.loads(line)
        printed, error = io.StringIO(), ""
        try:
            # Blank lines in front, so that a traceback names the line of the page.
            code = compile("\n" * request["line"] + request["text"], request["place"], "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, script.__dict__)
        except BaseException:
            error = traceback.format_exc()
        answers.write(json.dumps({"printed": printed.getvalue(), "error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
