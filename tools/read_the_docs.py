"""Builds the documentation as Read the Docs does: with the commands of ``.readthedocs.yaml``, in a clean environment.

python tools/read_the_docs.py FOLDER       # creates the environment and the pages in FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def main(folder: str) -> int:
    work = Path(folder).resolve()
    configuration = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    venv.create(work / "environment", clear=True, with_pip=True)
    programs = work / "environment" / "bin"
    environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    for command in configuration["build"]["jobs"]["install"]:
        print(f"$ {command}", flush=True)
        subprocess.run(command, shell=True, cwd=ROOT, env=environment, check=True)
    sphinx = configuration["sphinx"]
    strictly = ["-W", "--keep-going"] if sphinx["fail_on_warning"] else []
    source = (ROOT / sphinx["configuration"]).parent
    options = ["-q", "-T", *strictly, "-b", "html", "-d", str(work / "doctrees"), "-D", "language=en"]
    built = [str(programs / "python"), "-m", "sphinx", *options, ".", str(work / "html")]
    return subprocess.run(built, cwd=source, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
