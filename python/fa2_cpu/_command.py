# SPDX-License-Identifier: Apache-2.0
"""The command `fa2` of an installed package: runs the program inside it.

What the program cannot read itself, .npz and .pt files, goes to it as safetensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

__all__ = ["main"]

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "fa2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `fa2` with these arguments, or those of the process; gives its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not os.access(_PROGRAM, os.X_OK):
        print(
            "fa2: this build of fa2-cpu has no command; install CLI11, fmt and nlohmann_json (libcli11-dev libfmt-dev "
            "nlohmann-json3-dev) and build it again",
            file=sys.stderr,
        )
        return 2
    foreign = [a.endswith((".npz", ".pt", ".pth")) and os.path.isfile(a) for a in arguments]
    if not any(foreign):
        os.execv(_PROGRAM, ["fa2", *arguments])
    with tempfile.TemporaryDirectory(prefix="fa2-") as folder:
        from fa2_cpu._verify import converted

        for n, path in enumerate(arguments):
            if not foreign[n]:
                continue
            try:
                arguments[n] = converted(path, folder, n)
            except Exception as error:  # noqa: BLE001: a file that is none of what its name says
                lines = str(error).splitlines() or [type(error).__name__]
                print(f"fa2: {path}: {lines[0]}", file=sys.stderr)
                return 2
        return subprocess.run([_PROGRAM, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
