"""Management commands, called as tests call them: what they write and how they end."""

import io

from django.core.management import call_command


def run_command(name, *arguments, **options):
    """Run a command: its exit code, the lines of its output, and those of its errors."""
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    try:
        call_command(name, *arguments, stdout=output, **{"stderr": errors, **options})
    except SystemExit as exited:
        code = int(str(exited.code))
    return code, output.getvalue().splitlines(), errors.getvalue().splitlines()
