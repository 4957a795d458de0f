"""What protection costs, measured: ``python -m tests.benchmarks``.

``docs/benchmarks.md`` has the figures and how to read them. Nothing here is a test, but for ``test_smoke.py``, which
keeps it running.
"""
