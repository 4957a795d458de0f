"""Run management commands, and capture their output and exit code."""

import io

from django.core.management import call_command


def run_command(name, *arguments, **options):
    """Run a command. Returns its exit code and the lines of its standard output and standard error."""
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    try:
        call_command(name, *arguments, stdout=output, **{"stderr": errors, **options})
    except SystemExit as exited:
        code = int(str(exited.code))
    return code, output.getvalue().splitlines(), errors.getvalue().splitlines()
