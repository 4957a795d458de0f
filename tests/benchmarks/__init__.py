"""What protection costs, measured: ``python -m tests.benchmarks``.

``docs/explanation/benchmarks.md`` has the figures and says how to read them. Nothing here is a test, except
``test_smoke.py``, which keeps it running.
"""
