"""What protection costs, measured: ``python -m tools.benchmarks``.

``docs/explanation/costs.md`` has the figures and says how to read them. ``tests/test_benchmarks.py`` keeps it running.
"""
