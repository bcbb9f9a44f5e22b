"""Run the Python blocks of the documents given, each document in a namespace of its own; prints JSON.

A module to be run in a process of its own: what the blocks do to the process stays there.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import warnings
from pathlib import Path

from tests.docs.markdown import blocks


def run(path: Path) -> str:
    """Return "" or the traceback of the first block that fails."""
    import bagua

    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in blocks(path):
            if block.language == "python":
                # Line numbers as in the document, so that a traceback points there. Without this module's own
                # `from __future__ import annotations`, by which dataclasses would take each ClassVar for a field.
                code = compile("\n" * (block.line - 1) + block.text, str(path), "exec", dont_inherit=True)
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(code, namespace)
    except BaseException:
        return traceback.format_exc()
    finally:
        bagua.destroy_process_group()
    return ""


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")  # what Lightning warns itself of is no error of the document
    print(json.dumps({name: run(Path(name)) for name in sys.argv[1:]}))
